"""HTML as a tree, strictly: an element that is not closed, or closed twice, is an error."""

from html.parser import HTMLParser

_VOID = {"meta", "link", "img", "br", "hr", "input", "line", "rect", "circle", "polyline"}


class Element:
    def __init__(self, tag, attributes, parent=None):
        self.tag, self.attributes, self.parent, self.children, self.own = tag, dict(attributes), parent, [], []

    def __iter__(self):
        yield self
        for child in self.children:
            yield from child

    def all(self, tag=None, **attributes):
        """Elements with this tag and these attributes; `kind` is a class."""
        kind = attributes.pop("kind", None)
        return [
            one
            for one in self
            if (tag is None or one.tag == tag)
            and (kind is None or kind in (one.attributes.get("class") or "").split())
            and all(one.attributes.get(key) == value for key, value in attributes.items())
        ]

    def one(self, tag=None, **attributes):
        [found] = self.all(tag, **attributes)
        return found

    @property
    def text(self):
        return "".join(item if isinstance(item, str) else item.text for item in self.own)


class _Tree(HTMLParser):
    def __init__(self):
        super().__init__()
        self.root = self.here = Element("", [])

    def handle_starttag(self, tag, attrs):
        child = Element(tag, attrs, self.here)
        self.here.children.append(child)
        self.here.own.append(child)
        if tag not in _VOID:
            self.here = child

    def handle_startendtag(self, tag, attrs):
        child = Element(tag, attrs, self.here)
        self.here.children.append(child)

    def handle_endtag(self, tag):
        assert tag == self.here.tag, f"</{tag}> closes <{self.here.tag}>"
        self.here = self.here.parent

    def handle_data(self, data):
        self.here.own.append(data)


def parsed(html):
    """The tree of a page."""
    tree = _Tree()
    tree.feed(html)
    tree.close()
    assert tree.here is tree.root, f"<{tree.here.tag}> is not closed"
    return tree.root
