"""A reward of the tests' own: it depends on the text alone, and about half of the responses get it."""


def by_length(response, label, question):
    return float(len(response) % 2)
