"""The engine process as the front end sees it: the client, its mailboxes and the states."""
