"""The words and colours of the small world: what the model can name. Nouns only; imports nobody."""

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 50, 47),
    "green": (40, 160, 60),
    "blue": (40, 90, 210),
    "yellow": (240, 200, 30),
    "purple": (140, 60, 170),
    "orange": (240, 130, 30),
    "black": (22, 22, 22),
    "white": (245, 245, 245),
}

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 250),
    "light grey": (205, 205, 205),
    "grey": (135, 135, 135),
    "dark grey": (70, 70, 70),
    "black": (10, 10, 10),
    "beige": (232, 218, 190),
    "pink": (245, 190, 205),
    "light blue": (170, 210, 240),
    "dark blue": (20, 30, 80),
    "light green": (185, 230, 180),
    "dark green": (15, 60, 35),
    "brown": (105, 70, 45),
}

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
ORDINALS = ("first", "second", "third")

SIDES = ("left", "right", "above", "below")
PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the middle", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
CHARACTERS = LETTERS + DIGITS
ALONE = tuple(c for c in CHARACTERS if c not in "OI01")  # without a neighbour, O and 0, I and 1 look alike

_WORDS = """
CAT DOG SUN STOP EXIT OPEN GO UP NO YES HI ON OFF IN OUT BUS CAR TAXI CAFE BAR SHOP SALE FREE NEW HOT COLD ICE
TEA MILK FISH BEEF RICE EGG HAM PIE JAM NUT FIG OAK ELM FOX OWL BEE ANT COW PIG HEN RAT BAT LION BEAR WOLF
DEER DUCK FROG MOON STAR SKY SEA LAKE HILL ROCK SAND WIND RAIN SNOW FIRE GOLD IRON ZINC BLUE RED KEY BOX CUP
MAP PEN TOY HAT BED LAMP DOOR DESK BOOK PAGE WORD ZOO JAZZ QUIZ VAN VIEW KIT KID JOY GYM WAY WAX YAK
"""
PRINTED = tuple(_WORDS.split())


def plural(noun: str) -> str:
    """crosses, circles."""
    return noun + ("es" if noun.endswith("s") else "s")


def article(phrase: str) -> str:
    """a red circle, an orange ring."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def listing(parts: list[str]) -> str:
    """a, b and c."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
