"""What a run trains: model, step and optimizer; and how it starts and resumes."""
