"""What a solved exercise of the spine is worth: the line that check.py prints after "solved"."""

import judging
import lesson

# Bits per byte of yours.py without and with a part, in the order of README.md: 11 and 17 together
# come before 12. Seed 0; another seed differs by up to 0.05.
WORTH = {
    2: "it drives every weight of your trainer, and changes its number by rounding alone",
    4: "in your trainer, 3.61 bits per byte become 3.50",
    5: "in your trainer, 3.50 bits per byte become 3.26",
    6: "your trainer's model writes by it, and so does --prompt",
    7: "every step of your trainer is yours, and its number changes by rounding alone",
    8: "in your trainer, 3.26 bits per byte become 2.71",
    9: "in your trainer, 2.71 bits per byte become 2.51",
    10: "in your trainer, 2.51 bits per byte become 2.39",
    11: "in your trainer each row begins with BOS, no place is padding and 25 tokens are lost",
    12: "in your trainer, 2.35 bits per byte become 2.31: under the line of counting",
    13: "it gives your trainer its number, whether the model reads bytes or tokens",
    14: "your trainer's model can be asked: --chat",
    17: "in your trainer, 2.39 bits per byte become 2.35, and no row is passed over",
}


def worth(number: int) -> str | None:
    """None for an exercise that is no part of the trainer."""
    if number == 1:
        training, held = (bytes(text.tolist()) for text in lesson.exam())
        answer = judging.load(lesson.COURSE / "exercises/ex01.py")
        bits = answer.bits_per_byte(training, held[1:], 6, 64.0)
        return f"on the exam of lessons 1 to 5: {bits:.3f} bits per byte, the line to get under"
    line = WORTH.get(number)
    return line and f"{line} (python course/yours.py)"
