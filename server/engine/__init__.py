"""The engine as the front end sees it: client, mailboxes, open requests, admission, states."""
