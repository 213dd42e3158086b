"""The front end: HTTP and text, no tensors. README.md in this folder is the overview."""
