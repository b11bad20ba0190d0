"""What runs on a node outside the engine. Standard library only, so that it also runs as a bare zipapp."""
