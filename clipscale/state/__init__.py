"""What a run trains: models, optimizer and weights; and what a checkpoint must hold of it."""
