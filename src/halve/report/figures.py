"""Numbers as they are written on the page."""


def percent(share: float | None, digits: int = 1) -> str:
    """Format a share, never rounded up to 100 %.

    >>> percent(0.941), percent(0.99996), percent(1.0), percent(None)
    ('94.1 %', '99.9 %', '100 %', '-')
    """
    if share is None:
        return "-"
    if share == 1:
        return "100 %"
    text = f"{100 * share:.{digits}f}"
    return f"{100 - 10**-digits:.{digits}f} %" if share < 1 and float(text) >= 100 else f"{text} %"


def ends(interval: tuple[float, float]) -> str:
    """Format a confidence interval of a share.

    >>> ends((0.917, 0.96))
    '91.7-96.0 %'
    """
    low, high = (percent(end).removesuffix(" %") for end in interval)
    return f"{low}-{high} %"


def ms(time: float | None) -> str:
    """Format milliseconds with three significant digits or more.

    >>> ms(0.01234), ms(7.5), ms(123.4), ms(None)
    ('0.0123', '7.50', '123', '-')
    """
    if time is None:
        return "-"
    return f"{time:.{0 if time >= 100 else 2 if time >= 1 else 3 if time >= 0.1 else 4}f}"


def count(value: float | None) -> str:
    """Format a count.

    >>> count(23454912)
    '23,454,912'
    """
    return "-" if value is None else f"{value:,.0f}"


def small(value: float | None) -> str:
    """Format a number such as a loss or a divergence.

    >>> small(0.00123), small(2.4318), small(1e-7), small(None)
    ('0.0012', '2.432', '1e-07', '-')
    """
    if value is None:
        return "-"
    if value and abs(value) < 1e-3 / 2:
        return f"{value:.2g}"
    return f"{value:.3f}" if abs(value) >= 1 else f"{value:.4f}"


def time(seconds: float) -> str:
    """Format a duration.

    >>> time(7.26), time(100), time(7300)
    ('7.3 s', '1:40 min', '2:01 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"


def plural(number: int, word: str) -> str:
    """A number with its noun.

    >>> plural(1, "layer"), plural(1200, "layer")
    ('1 layer', '1,200 layers')
    """
    return f"{number:,} {word}{'' if number == 1 else 's'}"
