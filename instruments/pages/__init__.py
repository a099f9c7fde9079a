"""Look at a run, or inside a model: pages and pictures, written as files that need no other."""
