"""The front end's side of the engine: client, mailboxes, open requests, admission, states."""
