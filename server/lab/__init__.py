"""Programs that measure servers over HTTP."""
