"""How a batch is divided: chunks, captions and hard negatives, and the memory for kept graphs."""
