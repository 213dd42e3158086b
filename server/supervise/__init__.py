"""The engine process: spawned, watched and restarted."""
