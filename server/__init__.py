"""The server: HTTP and text; knows no tensors. README.md beside this file is the map."""
