"""One API call, from its engine requests to the text of its choices."""
