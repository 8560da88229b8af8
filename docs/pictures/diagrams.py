"""Drawings: which command fits what one has, the way to a model in a browser, what each device holds."""

from docs.pictures.pages import SAYS, read_numbers
from docs.pictures.svg import MARGIN, WIDTH, Picture


def draw_decision_tree() -> str:
    """Draw a tree from what one has to the command and the page."""
    says = SAYS["decision_tree"]
    picture = Picture(says["title"])
    picture.text(MARGIN, 30, "What do you have?", "bold")
    branch = 0
    for y, (have, command, page) in zip(range(58, 10_000, 46), says["lines"], strict=False):
        inner = have.startswith("+ ")
        x, start = (54, branch + 26) if inner else (28, 40)
        branch = branch if inner else y
        picture.path(f"M{x} {start}V{y - 5}h12", "line")
        picture.text(x + 18, y, have.removeprefix("+ "), "" if inner else "bold")
        picture.text(x + 18, y + 18, command, "code")
        picture.text(WIDTH - MARGIN, y + 18, page, "soft end")
    return picture.finish(picture.paragraph(y + 48, says["words"]))


def draw_pipeline() -> str:
    """Draw the way from two text files to a model in a browser."""
    says = SAYS["pipeline"]
    picture = Picture(says["title"])
    picture.text(MARGIN, 30, "From two text files to a model in a browser", "bold")
    width, height, across, down, top = 126, 52, 154, 104, 66
    for index, (name, command, kind) in enumerate(says["stages"]):
        row, place = divmod(index, 3)
        back = row % 2 == 1
        x, y = MARGIN + across * (2 - place if back else place), top + down * row
        picture.box(x, y, width, height, "box")
        picture.text(x + width / 2, y + 22, name, "bold middle")
        picture.text(x + width / 2, y + 41, kind, "soft middle")
        picture.text(x + width / 2, y - 7, command, "code middle")
        if index == len(says["stages"]) - 1:
            break
        if place == 2:
            picture.path(f"M{x + width / 2} {y + height}v{down - height - 21}", "arrow")
        else:
            start = f"M{x} {y + 26}h-" if back else f"M{x + width} {y + 26}h"
            picture.path(f"{start}{across - width}", "arrow")
    return picture.finish(picture.paragraph(y + down - 22, says["words"]))


def draw_devices() -> str:
    """Draw which rows of a batch and which parameters four devices hold in each layout."""
    says = SAYS["devices"]
    picture = Picture(says["title"])
    y = 30.0
    for layout in says["layouts"]:
        picture.text(MARGIN, y, layout["name"], "bold")
        picture.text(MARGIN, y + 19, layout["meaning"], "soft")
        devices = zip(layout["rows"], layout["parameters"], strict=True)
        for device, (held_rows, held_parameters) in enumerate(devices):
            x = MARGIN + 111 * device
            picture.box(x, y + 30, 101, 86, "page")
            picture.text(x + 50.5, y + 46, f"device {device}", "soft middle")
            for part in range(4):
                kind = "ours" if str(part) in held_rows else "empty"
                picture.box(x + 7, y + 53 + 11 * part, 38, 9, kind, 1)
                kind = "other" if str(part) in held_parameters else "empty"
                picture.box(x + 54 + 11 * part, y + 53, 9, 42, kind, 1)
            picture.text(x + 26, y + 111, "rows", "soft middle")
            picture.text(x + 73, y + 111, "params", "soft middle")
        y += 134
        if "quotation" in layout:
            state, temporary = read_numbers(layout["quotation"])
            words = f"8 simulated devices: each {state.text} MiB of state, {temporary.text} MiB temporary"
            y = picture.paragraph(y, words) + 18
    return picture.finish(picture.paragraph(y + 4, says["words"]))
