"""Turns that need no picture: a greeting, what the model is for, and a question that cannot be answered."""

from random import Random

from tools.demo_model.turn import Turn

SMALL = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hello there", "Good morning"), "Hello! Show me a picture."),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am the small demo model of Twinlens.",
    ),
    (
        ("What can you do?", "What can you see?", "Help", "What are you for?", "How can you help me?"),
        "I can name shapes, colours, counts, places and short words in pictures.",
    ),
    (("Thanks", "Thank you", "Thank you!", "Thanks!", "Great", "Goodbye", "Bye"), "You are welcome."),
    (
        (
            "What is in the picture?", "How many circles are there?", "What colour is the star?", "Read the text.",
            "Is there a ring?", "What happens?", "Which picture has the triangle?", "Describe the picture.",
        ),
        "There is no picture. Show me one.",
    ),
    (
        (
            "What is the capital of France?", "Write a poem.", "Tell me a story.", "What time is it?", "How are you?",
            "Tell me a joke.", "What is two plus two?", "Say something.", "Translate this.", "Why is the sky blue?",
        ),
        "I only know shapes, colours and short words in pictures.",
    ),
)  # fmt: skip
RULES = ("You are a helpful assistant.", "Answer in a short sentence.", "You are Twinlens.", "Be brief.")


def small_talk(rng: Random) -> Turn:
    """A turn without a picture."""
    questions, answer = rng.choice(SMALL)
    return Turn("talk", rng.choice(questions), answer)
