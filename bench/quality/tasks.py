"""Documents whose answers stand in their own tokens, however far back: what sparse attention may lose and the loss on
text does not show. Every document comes from a random generator alone, and has exactly as many tokens as asked, the
separator behind it included.

A token is a byte (of text, or of the noise that hides what matters), the separator, one of the words below, or one of
`symbols` symbols, which have no meaning outside their document. marks[i] says what token i is to the model: a mark of
docs/formats.md, an answer's being the place of its task in TASKS.
"""

from collections import Counter

BYTES = 256
SEPARATOR, ASK, ANSWER, SET, LINK = range(BYTES, BYTES + 5)
FIRST_KIND = 264  # the first token of a document says which kind it is
FIRST_SYMBOL = 320

TILE = 64  # queries, which most patterns choose for together

# Text is told apart by the place in its tile of the query that predicts a token, for the last of a tile: behind all but
# the very last one come queries that help to choose what it sees. `text` is all before these.
LAST_PLACES = range(TILE - 9, TILE)
TEXT = ["text", *(f"text-{place}" for place in LAST_PLACES)]

# What answers are counted by. Recall is split by how far back the key was last shown: `far` is more than a sixteenth of
# the document.
TASKS = ["recall-near", "recall-far", "recall-power-near", "recall-power-far", "needles", "needles-by-4", "variables",
         "frequent-words", "hashes", *TEXT]
PLAIN, GIVEN = 0, 255


def least_symbols(length):
    """With fewer a document of `length` tokens would have to use one twice."""
    return max(16, length // 32)


def vocabulary(symbols):
    return FIRST_SYMBOL + symbols


class Document:
    def __init__(self, kind):
        self.tokens = [FIRST_KIND + list(KINDS).index(kind)]
        self.marks = [GIVEN]

    def give(self, *tokens):
        self.tokens.extend(tokens)
        self.marks.extend([GIVEN] * len(tokens))

    def answer(self, token, task):
        self.tokens.append(token)
        self.marks.append(1 + TASKS.index(task))


def sample_symbols(random, symbols, count):
    """So many different ones."""
    return [FIRST_SYMBOL + s for s in random.sample(range(symbols), count)]


def hide(random, document, events, length):
    """Adds `events` (each called to add its tokens; with their number) in order, at random places of `length` tokens of
    noise."""
    noise = random.randbytes(length - sum(tokens for tokens, _ in events))
    places = sorted(random.randrange(len(noise) + 1) for _ in events)
    start = 0
    for place, (_, add) in zip(places, events):
        document.give(*noise[start:place])
        add()
        start = place
    document.give(*noise[start:])


def recall(random, length, symbols, document, power):
    """Pairs of a key and the value that the document gave it. Keys come again after as many others as a uniform or, with
    `power`, a power law says."""
    keys = min(symbols // 2, length // 16)
    chosen = sample_symbols(random, symbols // 2, keys)
    values = {key: FIRST_SYMBOL + symbols // 2 + random.randrange(symbols // 2) for key in chosen}
    name = "recall-power" if power else "recall"
    shown = {}
    for _ in range((length - 2) // 2):
        rank = int(keys ** random.random()) - 1 if power else random.randrange(keys)
        key = chosen.pop(rank)
        chosen.insert(0, key)  # the most recent first
        document.give(key)
        here = len(document.tokens)
        if key not in shown:
            document.give(values[key])
        else:
            document.answer(values[key], name + ("-far" if here - shown[key] > length // 16 else "-near"))
        shown[key] = here


def needles(random, length, symbols, document, together):
    """Keys and values hidden in noise. At the end every value is asked for, `together` at a time: of several the answer is
    each key with its value, as whoever answers such a question says which value is which."""
    count = max(4, length // 64) // together * together
    found = sample_symbols(random, symbols, 2 * count)
    pairs = list(zip(found[::2], found[1::2]))
    task = "needles" if together == 1 else "needles-by-4"
    end = count // together * (3 if together == 1 else 2 + 3 * together)
    hide(random, document, [(3, lambda pair=pair: document.give(SET, *pair)) for pair in pairs], length - 2 - end)
    random.shuffle(pairs)
    for i in range(0, count, together):
        asked = pairs[i:i + together]
        document.give(ASK, *(key for key, _ in asked))
        if together > 1:
            document.give(ANSWER)
        for key, value in asked:
            if together > 1:
                document.give(key)
            document.answer(value, task)


def variables(random, length, symbols, document):
    """Assignments hidden in noise, of a new value (`SET x x value`) or of another variable (`SET y x`, and the value,
    which is asked for). At the end the values of all variables are asked for."""
    count = max(4, length // 64)
    names = sample_symbols(random, symbols // 2, count)
    values = {}

    def assign(name):
        source = random.choice(list(values)) if values and random.random() < 0.75 else name
        if source == name:
            values[name] = FIRST_SYMBOL + symbols // 2 + random.randrange(symbols // 2)
            document.give(SET, name, name, values[name])
        else:
            values[name] = values[source]
            document.give(SET, name, source)
            document.answer(values[name], "variables")

    hide(random, document, [(4, lambda name=name: assign(name)) for name in names], length - 2 - 3 * count)
    random.shuffle(names)
    for name in names:
        document.give(ASK, name)
        document.answer(values[name], "variables")


def frequent_words(random, length, symbols, document):
    """What subjects say: three words of ten a subject's own, five a fashion's that lasts an eighth of the document, the
    others anything. At the end every subject's most frequent word is asked for: no part of the document tells it."""
    count = max(2, length // 128)
    subjects = sample_symbols(random, symbols // 2, count)

    def word():
        return FIRST_SYMBOL + symbols // 2 + random.randrange(symbols // 2)

    own = {subject: word() for subject in subjects}
    said = (length - 2 - 3 * count) // 2
    for i in range(said):
        if i % -(-said // 8) == 0:
            fashion = {subject: word() for subject in subjects}
        subject = random.choice(subjects)
        which = random.random()
        document.give(subject, own[subject] if which < 0.3 else fashion[subject] if which < 0.8 else word())
    document.give(*random.randbytes(length - 2 - 3 * count - 2 * said))
    random.shuffle(subjects)
    heard = {subject: Counter() for subject in subjects}
    for subject, said_word in zip(document.tokens[1:2 * said:2], document.tokens[2:2 * said + 1:2]):
        heard[subject][said_word] += 1
    for subject in subjects:
        first, second = (heard[subject].most_common(2) + [(0, 0)] * 2)[:2]
        document.give(ASK, subject)
        if first[1] > second[1]:
            document.answer(first[0], "frequent-words")
        else:  # nobody could tell
            document.give(own[subject])


def hashes(random, length, symbols, document):
    """Links from one hash, two symbols, to the next, hidden in noise in any order. At the end the rest of a chain is
    asked for from its first hash: three hops."""
    hops = 3
    chains = max(1, length // 256)
    found = sample_symbols(random, symbols, chains * (hops + 1) * 2)
    chain = [[tuple(found[2 * h:2 * h + 2]) for h in range(c * (hops + 1), (c + 1) * (hops + 1))] for c in range(chains)]
    links = [pair for hashes_of in chain for pair in zip(hashes_of, hashes_of[1:])]
    random.shuffle(links)
    hide(random, document, [(5, lambda link=link: document.give(LINK, *link[0], *link[1])) for link in links],
         length - 2 - chains * (1 + 2 * (hops + 1)))
    for hashes_of in chain:
        document.give(ASK, *hashes_of[0])
        for part in [part for one in hashes_of[1:] for part in one]:
            document.answer(part, "hashes")


def text(random, length, document, corpus):
    """A piece of `corpus`, bytes that hold more than `length`. Places are right where a document begins with a tile."""
    start = random.randrange(len(corpus) - length)
    for byte in corpus[start:start + length - 2]:
        place = (len(document.tokens) - 1) % TILE  # a token is predicted by the one before it
        document.answer(byte, f"text-{place}" if place in LAST_PLACES else "text")


KINDS = {
    "recall": lambda random, length, symbols, document: recall(random, length, symbols, document, power=False),
    "recall-power": lambda random, length, symbols, document: recall(random, length, symbols, document, power=True),
    "needles": lambda random, length, symbols, document: needles(random, length, symbols, document, together=1),
    "needles-by-4": lambda random, length, symbols, document: needles(random, length, symbols, document, together=4),
    "variables": variables,
    "frequent-words": frequent_words,
    "hashes": hashes,
    "text": text,
}


def make_document(kind, random, length, symbols, corpus):
    """`length` tokens with the separator that follows. `length` is even and at least 64."""
    document = Document(kind)
    if kind == "text":
        text(random, length, document, corpus)
    else:
        KINDS[kind](random, length, symbols, document)
    document.give(*random.randbytes(length - 1 - len(document.tokens)))
    return document
