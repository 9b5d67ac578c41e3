"""Task groups for DAG authors."""
