"""Use a model: continue a prompt, talk in the terminal."""
