"""Programs that measure a server over HTTP."""
