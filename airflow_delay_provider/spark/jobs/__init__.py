"""Jobs that spark-submit runs: bulk scheduling, the streaming dispatcher, the lateness report."""
