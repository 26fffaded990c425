"""The encoder service: pictures, videos and sounds in, embedding rows out."""
