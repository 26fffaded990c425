"""The link to the encoders: which there are, which one is asked, and how rows arrive. Protobuf stops here."""
