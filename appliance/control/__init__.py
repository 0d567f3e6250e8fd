"""The control plane: what one gateway of a site decides for all workers."""
