"""How a batch is divided: chunks, captions and hard negatives."""
