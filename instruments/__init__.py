"""Optional: delete this folder and training still runs. Imported only when asked for."""
