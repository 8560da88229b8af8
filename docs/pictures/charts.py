"""Charts of the numbers of the pages: speeds beside other systems, and what techniques gain."""

from docs.pictures.pages import SAYS, Number, read_numbers
from docs.pictures.svg import MARGIN, WIDTH, Picture

# ---- speeds ----


def draw_speeds() -> str:
    """Draw our speed beside that of each peer."""
    says = SAYS["speeds"]
    picture = Picture(says["title"])
    y = 30.0
    for task, heading in (("training", "Training"), ("translation", "Translation, beam size 4")):
        picture.text(MARGIN, y, heading, "bold")
        picture.text(WIDTH - MARGIN, y, "target tokens per second", "soft end")
        y += 24
        for race in says[task]:
            numbers = read_numbers(race["quotation"])
            ours, peer = (numbers[index] for index in race["numbers"])
            label = f"{ours.text} ({ours.value / peer.value:.2f}x)"
            picture.text(MARGIN, y, race["task"])
            _draw_bar(picture, y + 9, "flaxformer_mt", ours, unit=peer.value, label=label)
            _draw_bar(picture, y + 30, race["peer"], peer, unit=peer.value, label=peer.text)
            differs = race["differs"].format(*(number.text for number in numbers))
            y = picture.paragraph(y + 68, differs) + 14
        y += 6
    return picture.finish(picture.paragraph(y - 8, says["words"]))


def _draw_bar(picture: Picture, top: float, name: str, speed: Number, *, unit: float, label: str) -> None:
    left, scale = 118, 106 / unit
    picture.text(left - 8, top + 13, name, "soft end")
    picture.box(left, top, speed.value * scale, 17, "ours" if name == "flaxformer_mt" else "peer", 2)
    low, high = left + speed.low * scale, left + speed.high * scale
    if low < high:
        ends = f"M{low:.4g} {top + 4}v9M{high:.4g} {top + 4}v9"
        picture.path(f"M{low:.4g} {top + 8.5}H{high:.4g}{ends}", "line")
    picture.text(round(high + 8), top + 13, label, "soft")


# ---- gains of techniques ----


def read_gains() -> dict[str, list[float]]:
    """Return the differences in BLEU that each technique makes, one for each pair of runs."""
    gains: dict[str, list[float]] = {}
    for technique, quotations in SAYS["gains"]["techniques"].items():
        gains[technique] = []
        for quotation in quotations:
            scores = [number.value for number in read_numbers(quotation)]
            half = len(scores) // 2
            pairs = zip(scores[:half], scores[half:], strict=True)
            gains[technique] += [round(after - before, 2) for before, after in pairs]
    return gains


def draw_gains() -> str:
    """Draw each gain as a dot, over the band of what two runs of one recipe may differ."""
    says, all_gains = SAYS["gains"], read_gains()
    runs = [number.value for number in read_numbers(says["seeds"])]
    band = round(max(runs) - min(runs), 2)
    picture = Picture(says["title"].format(band=band))
    zero, unit, top, step = 350, 33, 72, 44
    bottom = top + step * len(all_gains)
    picture.text(MARGIN, 30, "What techniques change, in BLEU", "bold")
    picture.box(zero - band * unit, top - 16, 2 * band * unit, bottom - top + 8, "pale", 0)
    for score in range(-3, 4):
        picture.path(f"M{zero + score * unit} {top - 16}V{bottom - 8}", "rule" if score else "line")
        picture.text(zero + score * unit, top - 22, f"{score:+d}" if score else "0", "soft middle")
    for y, (technique, gains) in zip(range(top + 8, bottom + 8, step), all_gains.items(), strict=True):
        outside = sum(abs(gain) > band for gain in gains)
        verdict = f"{outside} of {len(gains)} outside the band" if outside else "within the band"
        picture.text(MARGIN, y, technique)
        picture.text(MARGIN, y + 16, verdict, "soft")
        for gain in sorted(gains, key=abs):
            kind = "hollow" if abs(gain) <= band else "ours" if gain > 0 else "other"
            picture.dot(zero + gain * unit, y, kind)
    return picture.finish(picture.paragraph(bottom + 14, says["words"].format(band=band)))
