"""Writes the prompts behind the demo data: `demo_prompts.jsonl` (training) and `demo_heldout_prompts.jsonl`.

    python data/make_demo_prompts.py

Prompts are templates filled with topics, drawn with a fixed seed, so the files can be made again byte for byte.
The held-out prompts use other templates AND other topics than the training prompts: a drafter is judged on
requests whose wording it has not met. Answers are not written here; the target writes them
(`python -m dflash_lib regenerate`).
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEED = 20261129
NUM_TRAIN = {"facts": 300, "explanations": 300, "lists": 180, "stories": 180, "rewriting": 180, "arithmetic": 235,
             "code": 125}
NUM_HELDOUT_PER_KIND = 8

# --- training: kind -> (templates, topics) ------------------------------------------------------------------
THINGS = """rain, a bicycle, a battery, photosynthesis, a compass, bread, tides, a steam engine, soap, glass,
the moon, volcanoes, bees, coral reefs, the human heart, vaccines, earthquakes, rainbows, magnets, electricity,
gravity, wind power, solar panels, rivers, glaciers, deserts, the water cycle, dinosaurs, whales, spiders,
trees, the ocean, clouds, fire, salt, gold, iron, paper, printing, the telephone, radio, computers, the
internet, airplanes, trains, ships, bridges, clocks, maps, money, banks, cities, farming, rice, coffee,
chocolate, cheese, honey, sugar, tea, cotton, silk, the lungs, sleep, memory, music, painting, poetry, theatre,
chess, football, swimming, hiking, gardening, cooking, libraries, museums, schools, languages, mathematics,
planets, comets, stars, black holes, atoms, cells, DNA, bacteria, fungi, insects, birds, fish, snakes,
elephants, penguins, wolves, horses, cats""".replace("\n", " ").split(", ")

ASPECTS = """stay healthy, save money, learn a new language, sleep better, study for an exam, plan a trip, cook for a
family, keep a garden, reduce waste, make new friends, write a good letter, stay focused at work, take better photos,
prepare for an interview, save water at home, read more books, start running, organise a desk, care for a dog, use
less electricity, plan a birthday party, clean a kitchen, travel with children, build a habit, manage stress,
give a speech, learn to draw, keep a diary, choose a gift, help a neighbour""".replace("\n", " ").split(", ")

HEROES = """a lost kitten, an old lighthouse keeper, a brave little robot, two sisters, a curious fox, a baker who
cannot taste, a boy with a red kite, a tired dragon, a girl who collects stones, a clockmaker, a sailor far from home,
a talking tree, a shy giant, a young astronaut, a painter in the rain, a wooden toy, a farmer and his donkey, a mouse
in a library, a snowman in spring, a queen without a crown, a fisherman, a small cloud, a violin player, a postman on
an island, a grandmother and her radio, a dog who waits, a crow and a coin, a magician, a teacher in a new school,
twin brothers""".replace("\n", " ").split(", ")

SENTENCES = """The meeting was moved because the manager was ill and nobody else could lead it.
I really like this restaurant, the food is good and the people are nice.
We were going to the beach but then it started to rain a lot.
He don't know where are the keys of the car.
The company has decided to not continue with the project at this time.
My brother is good at math but he is not so good at writing.
The weather was bad, so the game was cancelled, and everyone went home.
Please send me the report when you have finished it, it is important.
She was walking in the park when she seen a big dog.
The new phone is expensive but it has a very good camera.
Our team worked hard and we finished the work before the deadline.
It is my opinion that the plan will not work because it costs too much.
The children was playing in the garden and they was very loud.
Due to the fact that the road was closed, we arrived late.
I am writing to ask you if you could help me with my homework.
The book was long and boring, and I did not finish it.
There is many reasons why people moves to big cities.
The train was late again and I missed my appointment with the doctor.
This product is cheap, but it breaks easily and I would not buy it again.
The teacher explained the lesson two times but we still did not understand.
We have a problem with the printer and we need somebody to fix it today.
The museum is closed on Monday, but you can visit it on every other day.
He runs fast, he jumps high, and he wins nearly every race.
In the past people used to write letters, but now they send messages.
The soup was too salty and the bread was old.
I think that maybe we should possibly consider to leave a bit earlier.
The garden looks beautiful in spring when all of the flowers are open.
Because of the noise from the street she could not sleep last night.
The store gives a discount to students, teachers and people over sixty.
My computer is slow and it makes a strange noise when I turn it on.""".split("\n")

FUNCTIONS = """adds two numbers, returns the largest number in a list, counts the vowels in a string, reverses a string,
checks whether a number is even, computes a factorial, sums a list, removes duplicates from a list, converts Celsius
to Fahrenheit, checks whether a word is a palindrome, returns the first n Fibonacci numbers, finds the smallest number
in a list, counts the words in a sentence, computes the average of a list, joins two lists, checks whether a number is
prime, returns the length of a string, sorts a list of numbers, squares every number in a list, finds the longest word
in a list, prints a multiplication table, merges two dictionaries, capitalises each word, counts how often a letter
occurs, computes the area of a circle""".replace("\n", " ").split(", ")

TRAIN = {
    "facts": (["What is {}?", "Tell me something about {}.", "Give me one interesting fact about {}.",
               "Write two sentences about {}.", "What should everyone know about {}?",
               "In one sentence, what is {}?", "Why are people interested in {}?"], THINGS),
    "explanations": (["Explain {} to a child.", "Explain in three sentences how people use {}.",
                      "Why does {} matter?", "Describe {} in simple words.",
                      "How would you explain {} to a friend?", "What makes {} important for us?"], THINGS),
    "lists": (["List five tips to {}.", "Give me three ways to {}.", "What are some easy steps to {}?",
               "Make a short checklist for someone who wants to {}.", "I want to {}. What should I do first?",
               "Name four things that help to {}."], ASPECTS),
    "stories": (["Write a short story about {}.", "Tell me a story of three sentences about {}.",
                 "Begin a fairy tale about {}.", "Write a short poem about {}.",
                 "Describe a day in the life of {}.", "Write a funny little story about {}."], HEROES),
    "rewriting": (["Rewrite this sentence: {}", "Correct the grammar: {}", "Make this sentence shorter: {}",
                   "Say this more politely: {}", "Rewrite the following text in the past tense: {}",
                   "Summarise in a few words: {}"], SENTENCES),
    "code": (["Write a Python function that {}.", "Show me Python code that {}.",
              "Write a short Python program that {}.", "How do I write a function in Python that {}?",
              "Give an example of a JavaScript function that {}."], FUNCTIONS),
}
FOLLOW_UPS = ["Now say it in one sentence.", "Can you give me an example?", "Why is that?", "Make it shorter.",
              "Tell me more.", "Can you explain the first point?", "Write it again in simpler words.",
              "What is the most important part?"]
SYSTEMS = ["You are a friendly teacher.", "Answer briefly.", "You are a careful assistant who writes simple English."]

NAMES = ["Anna", "Tom", "Maria", "Ben", "Lucy", "Omar", "Sofia", "David"]
GOODS = ["apples", "books", "pencils", "eggs", "tickets", "stones", "cards", "coins"]


def arithmetic(rng: random.Random) -> str:
    """One arithmetic request of the training set."""
    a, b, c = rng.randint(2, 60), rng.randint(2, 30), rng.randint(2, 9)
    name, good = rng.choice(NAMES), rng.choice(GOODS)
    return rng.choice([
        f"What is {a} + {b}?", f"What is {a} times {c}?", f"Calculate {a * c} divided by {c}.",
        f"{name} has {a + b} {good} and gives away {b}. How many are left?",
        f"{name} buys {c} boxes with {b} {good} each. How many {good} is that?",
        f"Add the numbers {a}, {b} and {c}.", f"What is half of {2 * a}? Show your steps.",
    ])


# --- held out: other templates, other topics ----------------------------------------------------------------
HELDOUT = {
    "facts": ["Who was Marie Curie?", "Which animals live in Australia?", "What happened during the Renaissance?",
              "What can you tell me about the city of Paris?", "Name the largest continent and describe it briefly.",
              "When do leaves fall from the oak, and what happens then?", "What does a judge do all day?",
              "How big is an ant, and how strong can it be?"],
    "explanations": ["How does a refrigerator keep milk cold?", "My son asks where thunder comes from. What do I say?",
                     "What is the difference between a virus and an allergy?",
                     "Could you clarify what inflation means?",
                     "Help me understand how a microscope lets us see tiny things.",
                     "Walk me through the way a letter travels to another country.",
                     "What role does the kidney play inside the body?", "For what reason do onions make us cry?"],
    "lists": ["Which tools belong in a toolbox?", "Suggest some healthy breakfasts.",
              "I am moving to a new flat. What do I need to buy?", "What games can ten guests play indoors?",
              "Recommend activities for a rainy Sunday afternoon.", "What belongs into a first aid kit?",
              "Ideas for a cheap weekend with grandparents, please.", "Which questions could I ask a new colleague?"],
    "stories": ["Once upon a time there was a pirate who feared water. Continue.",
               "Invent a legend of the northern lights.",
                "Compose a bedtime tale for my daughter in which a hedgehog learns to dance.",
                "A spaceship lands in a supermarket. What happens next?", "Imagine a world where shadows can speak.",
                "Write the opening paragraph of a mystery novel set on a night ferry.",
                "Create a dialogue between a pumpkin and a scarecrow.",
                "Make up a story in which a key changes everything."],
    "rewriting": ["Turn this note into a formal email: hey, cant come tomorrow, sorry, lets do friday",
                  "Improve my text: The hotel were clean but breakfast was not tasty and staff not friend.",
                  "Please paraphrase: Many hands make light work.",
                  "Change this into a question: The bakery opens at seven every morning.",
                  "Translate this into plain English: The aforementioned premises shall be vacated forthwith.",
                  "Make the following sound more cheerful: The long winter is finally ending.",
                  "Fix the spelling: Tommorow we will recieve the pakage from are aunt.",
                  "Express this with more detail: The cook made dinner."],
    "arithmetic": ["A ticket costs 7 dollars. What do 6 tickets cost together?", "Subtract 19 from 84.",
                   "If a bus leaves at 3:15 and drives 50 minutes, at what time does it arrive?",
                   "Is 91 larger than 7 multiplied by 12?", "How many minutes are there in 4 hours?",
                   "A rectangle is 8 metres long and 5 metres wide. Work out its area.",
                   "Twelve cakes are shared equally by four friends. What does each one get?",
                   "Count from 3 to 30 in threes."],
    "code": ["Implement bubble sort in Python.", "I need a script which reads a text file line by line.",
             "Define a class for a bank account with deposit and withdraw methods.",
             "Using a while loop, print the numbers from ten down to one.",
             "Provide an HTML page with a heading and a button.", "Write SQL to select all customers from Berlin.",
             "How can I catch an exception when dividing by zero?",
             "Build a tiny command line calculator, please."],
}


def train_conversations(rng: random.Random) -> list[dict]:
    """The training conversations (user turns only), all distinct, in random order so that any prefix is mixed."""
    prompts = {kind: [template.format(topic) for template in templates for topic in topics]
               for kind, (templates, topics) in TRAIN.items()}
    prompts["arithmetic"] = sorted({arithmetic(rng) for _ in range(3 * NUM_TRAIN["arithmetic"])})
    rows = []
    for kind, number in NUM_TRAIN.items():
        for prompt in rng.sample(prompts[kind], number):
            messages = [{"role": "user", "content": prompt}]
            if rng.random() < 0.06:
                messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
            if rng.random() < 0.18:
                messages.append({"role": "user", "content": rng.choice(FOLLOW_UPS)})
            rows.append({"kind": kind, "messages": messages})
    rng.shuffle(rows)
    return [{"id": f"train-{i:04d}", **row} for i, row in enumerate(rows)]


def heldout_conversations() -> list[dict]:
    """The held-out prompts, kinds taking turns so that any prefix is balanced."""
    rows = [(kind, prompts[i]) for i in range(NUM_HELDOUT_PER_KIND) for kind, prompts in HELDOUT.items()]
    return [{"id": f"heldout-{i:02d}", "kind": kind, "messages": [{"role": "user", "content": prompt}]}
            for i, (kind, prompt) in enumerate(rows)]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path.name}: {len(rows)} conversations")


if __name__ == "__main__":
    write(HERE / "demo_prompts.jsonl", train_conversations(random.Random(SEED)))
    write(HERE / "demo_heldout_prompts.jsonl", heldout_conversations())
