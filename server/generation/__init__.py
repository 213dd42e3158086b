"""One API call from engine requests to text."""
