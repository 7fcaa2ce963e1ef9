"""What a trace needs of the workers: replays, and what else it asks for."""
