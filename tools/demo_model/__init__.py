"""The small trained model of `models/demo`: scenes, questions, training, export and evaluation."""
