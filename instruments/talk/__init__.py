"""Use a model: continue a prompt, talk in the terminal, serve it over HTTP."""
