"""The encoder service: pictures and videos in, embedding rows out."""
