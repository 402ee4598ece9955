"""The contrastive loss without a batch x batch matrix."""
