"""The way to the encoders: who is there, who is asked, and how rows come in. Protobuf stops here."""
