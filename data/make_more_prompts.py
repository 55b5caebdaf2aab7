"""Writes `more_prompts.jsonl`: further training prompts of the demo's seven kinds, in other words than
`make_demo_prompts.py` has them, for the longer training of `notebooks/params/smollm2.yaml`.

    python data/make_more_prompts.py OUT

Templates filled with topics, drawn with a fixed seed. No template and no topic is one of the held-out prompts'
(`make_demo_prompts.HELDOUT`), nor one of the first training prompts': the drafter is to meet many ways of asking.
"""

import json
import random
import sys
from pathlib import Path

SEED = 20261130
NUM = {"facts": 330, "explanations": 370, "lists": 280, "stories": 300, "rewriting": 320, "arithmetic": 200,
       "code": 200}


def split(text: str) -> list[str]:
    """Comma-separated topics over several lines."""
    return " ".join(text.split()).split(", ")


PEOPLE = split("""Isaac Newton, Cleopatra, Leonardo da Vinci, Mozart, Abraham Lincoln, Galileo, Florence Nightingale,
Julius Caesar, Charles Darwin, Frida Kahlo, Albert Einstein, Joan of Arc, William Shakespeare, Nelson Mandela, Ada
Lovelace, Marco Polo, Vincent van Gogh, Beethoven, Mahatma Gandhi, Thomas Edison, Alexander the Great, Amelia Earhart,
Aristotle, Jane Austen, Louis Pasteur, Confucius""")
PLACES = split("""Japan, Brazil, Egypt, Rome, the Sahara, Iceland, London, India, the Amazon, New York, Greece,
Canada, Kenya, the Alps, Tokyo, Norway, Mexico, the Himalayas, Venice, China, Istanbul, Peru, the Arctic, Madrid,
Alaska, Hawaii""")
EVENTS = split("""the French Revolution, the First World War, the moon landing, the fall of the Berlin Wall, the
Industrial Revolution, the Black Death, the building of the pyramids, the Cold War, the American Civil War, the
invention of printing, the Olympic Games of antiquity, the discovery of penicillin, the Great Depression, the age of
exploration, the fall of Rome, the Silk Road""")
ANIMALS = split("""the giraffe, the owl, the octopus, the polar bear, the dolphin, the kangaroo, the bat, the
crocodile, the hummingbird, the turtle, the camel, the tiger, the frog, the butterfly, the shark, the elephant seal,
the gorilla, the eagle, the salmon, the beaver, the squirrel, the snail, the zebra, the chameleon""")
WORK = split("""a nurse, a plumber, a pilot, an architect, a journalist, a firefighter, a librarian, a chemist, a
carpenter, a lawyer, a dentist, an electrician, a chef, a translator, a farmer, a police officer, an engineer, a
photographer, a mechanic, a social worker, a biologist, a tailor""")
HOW = split("""an airplane stays in the air, a microwave oven heats food, the stomach digests a meal, plants drink
water, a camera takes a picture, a vaccine protects us, the eye sees colours, a bicycle stays upright, bread dough
rises, an elevator moves, a bank earns money, a search engine finds pages, a piano makes sound, a dam produces
electricity, a spider spins its web, birds find their way south, a caterpillar becomes a butterfly, glass is made, a
submarine dives, a thermometer measures heat, the seasons change, a mirror reflects light, a car engine runs, paper is
recycled, clouds turn into rain, a telephone carries a voice, muscles grow, a seed becomes a tree, soap removes dirt,
a lock and key work, stars are born, the ear hears, an election works, a volcano erupts, a battery stores energy,
wounds heal""")
WHY = split("""the sky is blue, the sea is salty, we dream, leaves are green, ice floats on water, metal feels cold,
cats purr, we yawn, bread gets mouldy, the days are short in winter, dogs wag their tails, boats float, some people
are left-handed, we need sleep, iron rusts, balloons rise, bees dance, prices go up, mosquitoes bite, hair turns grey,
it is hot at the equator, languages die out, we get hungry, the moon changes its shape, tea is hot longer in a thick
cup, popcorn pops""")
IDEAS = split("""democracy, supply and demand, evolution, electricity bills, friction, a budget, the stock market,
encryption, climate change, the food chain, a mortgage, insurance, artificial intelligence, copyright, recycling,
biodiversity, a healthy diet, the scientific method, human rights, a black hole, the nervous system, an algorithm,
taxes, photosynthesis in the sea, genetics, the speed of light, probability, cloud computing, renewable energy, a
metaphor, the immune system, the greenhouse effect, gross domestic product, a vacuum, the periodic table, a
constitution""")
PAIRS = split("""a crocodile and an alligator, weather and climate, a comet and an asteroid, a fruit and a vegetable,
coffee and tea, a novel and a short story, speed and acceleration, a lake and a pond, debit and credit, a moth and a
butterfly, the brain and the mind, hail and snow, a city and a town, jam and marmalade, a hurricane and a tornado,
memory and storage in a computer, an island and a peninsula, empathy and sympathy, a violin and a viola, gas and
liquid""")
NEEDS = split("""a camping trip, a job interview, a small kitchen, a beach holiday, a home office, a school bag, a
picnic, a garden shed, a winter hike, a baby's room, a long flight, a barbecue, a painting class, a wedding, a science
fair, a road trip, a student's first flat, an emergency at home, a dog walk, a sewing box, a music lesson, a bicycle
tour, a movie night""")
GOALS = split("""feel less tired, learn the guitar, eat more vegetables, stop wasting time, grow tomatoes, speak in
front of people, save for a house, improve handwriting, calm a crying child, find a part-time job, lose some weight,
write a novel, keep a room cool in summer, learn to swim as an adult, be a better listener, remember names, get up
early, decorate a small room, prepare for a marathon, teach a parrot to talk, reduce plastic at home, understand
poetry, make a website, train a puppy, write clear emails, host a dinner for friends, spend less on food""")
OPINION = split("""living in the country, working from home, owning a car, keeping a cat, reading on paper, taking the
train, school uniforms, learning Latin, playing team sports, eating no meat, studying abroad, buying second-hand
clothes, social media, a four-day week, nuclear power, shopping online, group work, living with flatmates""")
FIGURES = split("""a beekeeper who is afraid of bees, a ghost who wants to learn to cook, the last train of the night,
a clock that runs backwards, an old piano in an empty house, a girl who can talk to the wind, a detective with a bad
memory, two rival gardeners, a lonely satellite, a bear who opens a bakery, a boy who finds a map, a wizard without a
hat, a nurse on her first day, a river that forgets its way, an umbrella with a secret, a parrot who tells the truth,
a knight who hates fighting, a lost letter, the smallest elephant, an inventor and her flying bicycle, a scientist in
the jungle, a cat who travels by train, a storm at sea, a family of owls, a teacher who becomes invisible, a village
without children, a shoemaker and three mice, an astronaut who misses home, a singer who loses her voice, a robot in a
flower shop""")
SETTINGS = split("""a castle in the mountains, a busy market, an island in the fog, a school at night, a circus tent,
an old bookshop, a desert town, the bottom of the sea, a train station in winter, a space station, a forest after the
rain, a hospital, a quiet village, a theatre behind the stage, a harbour, a snowed-in hotel""")
THEMES = split("""friendship, courage, losing a game, forgiveness, the first day of spring, home, honesty, growing
old, the sea at night, patience, a broken promise, hope, autumn, music, being different, a long journey, gratitude,
jealousy, silence""")
TEXTS = """the shop was close when i get there so i goes home again
Our new neighbours is very friendly and has invite us for dinner.
Can you send the money until Friday? I need it urgent.
We are sorry to tell you that your order will be late because of the snow.
The film was okay but the end was kind of stupid and too long.
my dog ate the homework and now the teacher are angry with me
In my opinion the new bus line is useful, but the buses come too seldom.
The results of the experiment was not what we did expect.
There were a lot of people at the concert and the music was very loud.
I want a refund because the lamp broke after two days.
She told me she will come yesterday but she did not.
The cat sat near the window and watched the birds in the garden.
Students who read every day usually write better than those who do not.
Nobody knew the answer, so the teacher explained the problem once more.
He opened the door slowly, looked around the room and saw that it was empty.
You must hand in the form before the end of the month or you will pay a fine.
Although he was tired he continues to work until midnight.
The mayor said that the old bridge would be repaired in the spring.
We had a great time at the lake, we swam, we ate ice cream and we slept in a tent.
it would be good if you could maybe call me back some time today
The soup is cold, the waiter is slow and the table is dirty.
Eating fruit and vegetables every day helps the body to stay strong.
The company is growing fast and is looking for people with new ideas.
I have saw this movie three times and I still likes it.
Because the river was so high, the village had to be left for two days.
The old man walks to the park each morning and feeds the ducks.
Our flight has been cancelled and we don't know what should we do.
The lecture was interesting, but most of the audience could not hear it.
My grandmother makes the best pancakes and she never measures anything.
Smoking is not allowed in any part of the building at any time.
The report shows that sales have fallen in three of the four regions.
If I would have more time, I would learn to play the piano.
The sun came out, the snow melted and the streets became wet.
Thank you for your message, I will answer as soon as I am back.
The children has build a house from cardboard and they paints it red.
It was raining, we forgot the umbrella, we got completely wet.
A good friend is someone who listens and does not judge.
The computer must be restarted before the new program can be used.""".split("\n")
TASKS = split("""checks whether a year is a leap year, swaps two variables, finds the second largest number in a list,
removes all spaces from a string, converts minutes to hours and minutes, prints every line of a list with its number,
merges two sorted lists, counts how many words start with a given letter, rolls two dice, generates a random password,
computes the power of a number without using an operator for it, reads numbers until the user types zero, returns the
initials of a name, finds the common items of two lists, converts a number to binary, flattens a nested list, counts
lines in a text, validates an email address, computes compound interest, reverses the words of a sentence, draws a
triangle of stars, finds the index of an item, rounds prices to two decimals, groups words by length, computes the
median, checks whether two words are anagrams, filters out negative numbers, sums the digits of a number, converts a
list of names to upper case, prints a calendar week, simulates a coin toss, rotates a list by one place, finds all
divisors of a number, calculates a discount, stores phone numbers in a dictionary, translates numbers to words""")
CONCEPTS = split("""a list comprehension, a for loop, recursion, a dictionary, an if statement, a function with
default arguments, string formatting, a class with a constructor, inheritance, a lambda, a set, slicing, an import, a
generator, a tuple, a unit test, a decorator, a list of lists, boolean operators, the range function""")
TABLES = split("""the orders of one month, all books by one author, the ten oldest employees, the average price of
each product, students without a grade, the number of visitors by day, products that are sold out, the names of all
pupils in one class""")

TEMPLATES = {
    "facts": [
        (["Tell me who {} was and why people remember that name.", "What did {} achieve?",
          "Write a short biography of {}.",
          "Give me three facts about the life of {}."], PEOPLE),
        (["What is {} known for?", "Describe the landscape of {}.", "Where is {}, and what is the weather like there?",
          "What should a visitor see in {}?", "Write a short paragraph about the history of {}.",
          "What do people like to eat in {}?"], PLACES),
        (["Summarise {} in a few sentences.", "What caused {}?", "Why was {} important?",
          "What followed from {}?"], EVENTS),
        (["Where does {} live and what does it eat?", "How does {} protect itself?", "What is special about {}?",
          "Describe {} for a school report.", "How long can {} live, and how does it raise its young?"], ANIMALS),
        (["What are the duties of {}?", "How does one become {}?", "Describe the working day of {}.",
          "Which skills does {} need?"], WORK),
    ],
    "explanations": [
        (["Explain how {}.", "Can you explain how {}?", "I would like to know how {}.", "In simple terms, say how {}.",
          "Describe step by step how {}."], HOW),
        (["Tell me why {}.", "Do you know why {}?", "Explain to a class of ten-year-olds why {}.",
          "Give a short answer: why is it that {}?"], WHY),
        (["What does the term '{}' mean?", "Define {} and give an example.", "Give me a beginner's introduction to {}.",
          "Explain the idea of {} in one paragraph.", "Why should students learn about {}?"], IDEAS),
        (["How do {} differ?", "Compare {}.", "What do {} have in common, and where do they differ?"], PAIRS),
        (["What speaks for and against {}?", "Discuss the advantages of {}.", "Is {} a good idea? Give reasons."],
         OPINION),
    ],
    "lists": [
        (["What should I pack for {}?", "Write a shopping list for {}.", "Which things are useful for {}?",
          "Name seven items for {}.", "Help me prepare {}: make a list."], NEEDS),
        (["How can I {}? Give me some ideas.", "What helps to {}?",
          "Write down six pieces of advice for people who want to {}.",
          "Tell me the best ways to {}.", "Which habits help someone to {}?",
          "Plan a week for someone who wants to {}."],
         GOALS),
        (["List the pros and cons of {}.", "Give me five arguments for {}.", "What are common mistakes with {}?"],
         OPINION),
        (["Name five interesting things about {}.", "List the most famous sights of {}.",
          "Suggest a three-day trip through {}."], PLACES),
    ],
    "stories": [
        (["Tell a tale of {}.", "Write a story that starts with {}.", "I would like to hear a story about {}.",
          "Write the first scene of a film about {}.", "Invent an adventure of {}.",
          "What might happen to {}? Tell me a story.",
          "Write a fable about {}."], FIGURES),
        (["Describe {} as the beginning of a novel.", "Set a short story in {}.",
          "Two strangers meet in {}. Write what they say.",
          "Write a scary story that takes place in {}.", "Someone has lost a ring in {}. Tell what happens."],
         SETTINGS),
        (["Write a poem about {}.", "Tell a story that teaches something about {}.", "Write a song text about {}.",
          "Write a letter to a friend about {}.", "Write a diary entry about {}."], THEMES),
    ],
    "rewriting": [
        (["Proofread this: {}", "Make this text more formal: {}", "Write this in a friendlier way: {}",
          "Say the same in other words: {}", "Put this into the future tense: {}", "Shorten this: {}",
          "Here is a text. Make it better: {}", "Turn this into a short message to a friend: {}",
          "Rewrite this for a newspaper: {}", "Find the mistakes in this text and correct them: {}",
          "Make one longer paragraph out of this: {}", "Write the opposite of this: {}",
          "What is the main point of this text? {}", "Put this into a list of points: {}"], TEXTS),
    ],
    "code": [
        (["Write code that {}.", "Create a Python script which {}.", "Can you write a small program that {}?",
          "I am learning Python. Show me a function that {}.", "Write a Java method that {}.",
          "Give me a commented example of a program that {}."], TASKS),
        (["Show me how to use {} in Python.", "Explain {} with a code example.", "Write a small exercise about {}."],
         CONCEPTS),
        (["Write a database query that lists {}.", "How do I select {} in SQL?"], TABLES),
    ],
}


def arithmetic(rng: random.Random) -> str:
    """One arithmetic request, in other words than those of the first training prompts and of the held-out ones."""
    a, b, c = rng.randint(3, 90), rng.randint(3, 40), rng.randint(2, 12)
    name = rng.choice(["Julia", "Peter", "Amir", "Nina", "Carlos", "Emma"])
    good = rng.choice(["oranges", "stamps", "bottles", "marbles", "roses", "balloons", "shells", "chairs"])
    return rng.choice([
        f"Compute {a} minus {min(a, b)}.", f"Multiply {b} by {c}.", f"Divide {b * c} by {c} and explain your steps.",
        f"{name} has {a} {good} and finds {b} more. How many {good} does {name} have now?",
        f"There are {c} rows with {b} {good} in each row. How many {good} are there?",
        f"What is {c * 10} percent of {b * 10}?", f"Which is bigger, {a} or {b} plus {c}?",
        f"A train travels {b * 2} kilometres in one hour. How far does it travel in {c} hours?",
        f"{name} shares {b * c} {good} among {c} children. How many does each child get?",
        f"Solve for x: x + {b} = {a + b}.", f"What is the sum of {a}, {b} and {a + c}?",
        f"Round {a * 13 + c} to the nearest ten.", f"{name} earns {a} euros a day. How much is that in {c} days?",
        f"What comes next: {c}, {2 * c}, {3 * c}, {4 * c}?",
        f"Find the perimeter of a square with sides of {b} centimetres.",
    ])


def conversations(rng: random.Random) -> list[dict]:
    """One user turn each, all distinct, in random order."""
    prompts = {kind: [template.format(topic) for templates, topics in groups for template in templates
                      for topic in topics]
               for kind, groups in TEMPLATES.items()}
    prompts["arithmetic"] = sorted({arithmetic(rng) for _ in range(3 * NUM["arithmetic"])})
    rows = [(kind, prompt) for kind, number in NUM.items() for prompt in rng.sample(prompts[kind], number)]
    rng.shuffle(rows)
    return [{"id": f"more-{i:04d}", "kind": kind, "messages": [{"role": "user", "content": prompt}]}
            for i, (kind, prompt) in enumerate(rows)]


if __name__ == "__main__":
    rows = conversations(random.Random(SEED))
    Path(sys.argv[1]).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(len(rows), "prompts")
