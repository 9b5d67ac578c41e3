"""Where messages wait and arrive: one port, its adapters, and the consumer that works on any of them."""
