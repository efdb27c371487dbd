"""Word pools for the passages of `scripts.facts`. Each pool is split by position: seven tenths to train on."""

from __future__ import annotations

FIRST = """
Ada Bruno Carla Dimitri Elena Farid Greta Hugo Ines Jonas Karin Lucas Mara Nadia Oscar Petra Quentin Rosa Stefan Tania
Ulrich Vera Walter Xenia Yusuf Zelda Amir Bianca Cedric Daphne Edgar Fiona Gideon Helga Ivan Judith Klaus Leila Milan
Nora Olga Pablo Rachel Simon Theresa Umberto Viola Wanda Yara Zoran Agnes Boris Clara Dario Esther Felix Gloria Hector
Irene Jacob Kira Leon Miriam Nils Otto Paula Ralf Selma Tobias Ursula Victor Wilma Anton Bella Conrad Dora Emil Frieda
Gustav Hanna Igor Julia Kurt Lydia Martin Nina Oliver Pia Robert Sofia Thomas Vivian William Anita Bernard Cora Daniel
Eva Frank Grace Henry Iris Joseph Kate Louis Maria Neil Ophelia Peter Ruth Samuel Tara Vincent Wendy Alan Betty Carl
"""

CITY = """
Lisbon Oslo Vienna Prague Dublin Helsinki Warsaw Athens Geneva Lyon Naples Seville Porto Bergen Krakow Budapest Zurich
Hamburg Munich Rotterdam Antwerp Glasgow Cardiff Bristol Leeds York Bath Boston Denver Austin Seattle Chicago Memphis
Toronto Ottawa Montreal Calgary Halifax Havana Lima Quito Bogota Santiago Cusco Brasilia Recife Cairo Tunis Rabat Dakar
Accra Lagos Nairobi Kampala Lusaka Harare Durban Pretoria Amman Beirut Muscat Doha Tehran Ankara Izmir Baku Tbilisi
Delhi Mumbai Chennai Kolkata Jaipur Lahore Karachi Dhaka Colombo Kathmandu Bangkok Hanoi Saigon Manila Jakarta Seoul
Busan Tokyo Osaka Kyoto Nagoya Sapporo Beijing Shanghai Taipei Sydney Perth Brisbane Darwin Auckland Wellington Hobart
Turin Verona Venice Bologna Valencia Bilbao Malaga Granada Nantes Lille Rouen Dresden Leipzig Bremen Cologne Salzburg
"""

JOB = """
baker teacher nurse pilot carpenter lawyer farmer dentist plumber chemist librarian sculptor electrician journalist
architect tailor butcher gardener fisherman translator accountant surgeon mechanic painter welder biologist geologist
astronomer economist photographer poet novelist dancer singer conductor judge sailor firefighter detective blacksmith
potter weaver jeweler florist barber waiter cook brewer shepherd beekeeper veterinarian pharmacist optician therapist
psychologist programmer engineer surveyor banker broker auditor clerk secretary receptionist locksmith glazier roofer
mason driver courier postman miner logger ranger diver tutor coach referee jockey magician clown actor director editor
"""

FOOD = """
rice bread soup pizza pasta salad cheese olives apples pears plums cherries grapes melons figs dates peaches mangoes
bananas oranges lemons carrots potatoes tomatoes onions mushrooms spinach cabbage beans lentils peas corn noodles
dumplings pancakes waffles muffins cookies chocolate honey yogurt butter cream sausages ham bacon chicken turkey lamb
salmon trout tuna shrimp lobster oysters omelets curry stew tacos sushi falafel hummus porridge cereal almonds walnuts
"""

ANIMAL = """
cat dog parrot rabbit hamster turtle goldfish canary horse donkey goat sheep pig duck goose hen pony ferret lizard snake
frog mouse rat pigeon owl falcon hedgehog squirrel fox otter llama alpaca camel monkey gecko toad crab snail spider bee
"""

HOBBY = """
chess painting fishing knitting hiking swimming cycling sailing skiing climbing dancing singing gardening cooking baking
reading writing drawing pottery archery fencing boxing wrestling rowing surfing diving running skating golf tennis
football cricket rugby hockey volleyball basketball badminton poker origami astronomy photography calligraphy juggling
"""

INSTRUMENT = """
piano violin guitar flute drums cello harp trumpet clarinet oboe saxophone trombone accordion banjo mandolin ukulele
viola bassoon tuba organ harmonica lute sitar bagpipes recorder xylophone zither bugle fiddle cornet
"""

COLOUR = """
red blue green yellow orange purple pink brown black white gray silver golden violet scarlet crimson turquoise beige
maroon navy teal indigo ivory amber lavender magenta olive coral cream bronze copper emerald
"""

MATERIAL = """
wood steel glass plastic leather cotton wool silk paper stone marble clay rubber bamboo copper bronze aluminum iron
ceramic concrete brick granite linen nylon velvet felt cork wax ivory titanium brass tin slate sandstone oak
"""

PRODUCT = """
lamp chair kettle backpack watch bicycle table mirror blanket umbrella clock vase pen notebook wallet jacket scarf hat
boot glove radio camera speaker toaster blender mixer drill hammer ladder bucket tent sofa desk shelf cabinet basket
helmet skateboard kayak telescope
"""

SIGHT = """
lighthouse cathedral bridge castle museum tower harbor market fountain theater library palace temple garden statue
stadium mill monastery fortress canal waterfall cave lake beach opera observatory aquarium zoo windmill amphitheater
"""

TRADE = """
fishing mining tourism farming shipping banking textiles brewing forestry steelmaking winemaking shipbuilding weaving
printing pottery glassmaking publishing logging dairying beekeeping tanning milling quarrying carpentry cheesemaking
"""

WEATHER = """
rainy sunny windy foggy snowy humid dry mild stormy cloudy frosty icy hot cold cool warm misty hazy breezy damp
"""

FILLER = """
The weather was calm that week.|Nothing else was recorded that day.|The report was finished in the evening.
The rest of the file is empty.|Everyone agreed with the notes.|The meeting ended early.|More details will follow.
Some pages of the original were lost.|The list was checked twice.|Copies were sent to the office.
"""
