"""tacit side by side with non-private training and with the other libraries for private training: `make bench`."""
