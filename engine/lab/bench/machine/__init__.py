"""`foredraft bench machine`: what forwards cost here, and how close the engine comes to that."""
