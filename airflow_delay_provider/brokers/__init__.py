"""The port that every broker implements, its adapters, and the consumer that works with all of them."""
