"""What a figure shows, for tests."""


def lines(axis) -> list[tuple[list, list]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]


def check(figure, num_axes):
    """Draws it; its first axes, which must say what they show."""
    figure.canvas.draw()
    axes = figure.axes[:num_axes]
    assert all(axis.get_xlabel() and axis.get_title(loc="left") for axis in axes)
    return axes
