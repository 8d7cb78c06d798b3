"""Word lists the corpus draws from: names, animals, countries, opposites, things and their colours."""

GIRLS = (
    "Lily Mia Anna Emma Sara Lucy Ella Nora Zoe Ruby Rosa Ida Clara Maya Jane Alice Nina Eva Amy Kate Daisy Molly "
    "Sophie Grace Hana Leila Tara Olga Julia Marta"
).split()
BOYS = (
    "Tom Ben Max Sam Leo Tim Jack Finn Noah Luke Adam Oscar Paul Peter Theo Hugo Eli Omar Ravi Ivan Nico Alex Dan "
    "Jim Bob Carl Mark Will Henry Oliver"
).split()
PETS = (
    "Rusty Pip Fluffy Coco Biscuit Pepper Bruno Whiskers Sunny Spot Hazel Bramble Shadow Ginger Teddy Tiny Snowy "
    "Pebble Honey Ziggy Poppy Nibbles Patch Misty"
).split()
ANIMALS = (
    "fox rabbit bear mouse squirrel cat dog hedgehog deer duck frog turtle owl lamb pig goat pony bunny kitten puppy "
    "elephant lion tiger monkey penguin bird beaver otter panda dragon unicorn wolf "
    "shark whale dolphin crab snail giraffe zebra crocodile horse cow chicken parrot snake lizard koala kangaroo camel "
    "bat butterfly bee ant spider dinosaur raccoon badger moose seal swan goose hamster hippo rhino ladybug crow robot"
).split()
HEROINES = "princess queen fairy witch mermaid ballerina farmer baker sailor pirate".split()
HEROES = "prince king knight wizard cowboy farmer baker sailor pirate fisherman".split()
ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl qu sh sl st tr th".split()
VOWELS = "a e i o u a e i o ai ea ee oo ou".split()
CODAS = ["", "", "", *"b d g k l m n p r s t x ck ll nd ng nt rk st".split()]
ROBOTS = "Bolt Beep Robo Zip Tik Max-1 Gizmo Sparky".split()

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,England:London,Scotland:Edinburgh,"
        "Ireland:Dublin,Wales:Cardiff,Belgium:Brussels,the Netherlands:Amsterdam,Austria:Vienna,Switzerland:Bern,"
        "Poland:Warsaw,Hungary:Budapest,Greece:Athens,Turkey:Ankara,Russia:Moscow,Ukraine:Kyiv,Sweden:Stockholm,"
        "Norway:Oslo,Denmark:Copenhagen,Finland:Helsinki,Iceland:Reykjavik,Romania:Bucharest,Bulgaria:Sofia,"
        "Croatia:Zagreb,Serbia:Belgrade,Estonia:Tallinn,Latvia:Riga,Lithuania:Vilnius,Slovakia:Bratislava,"
        "Slovenia:Ljubljana,Japan:Tokyo,China:Beijing,India:New Delhi,South Korea:Seoul,Thailand:Bangkok,"
        "Vietnam:Hanoi,Indonesia:Jakarta,Nepal:Kathmandu,Iran:Tehran,Iraq:Baghdad,Egypt:Cairo,Morocco:Rabat,"
        "Kenya:Nairobi,Ghana:Accra,Ethiopia:Addis Ababa,Senegal:Dakar,Tunisia:Tunis,Nigeria:Abuja,Canada:Ottawa,"
        "the United States:Washington,Mexico:Mexico City,Cuba:Havana,Brazil:Brasilia,Argentina:Buenos Aires,"
        "Chile:Santiago,Peru:Lima,Colombia:Bogota,Ecuador:Quito,Uruguay:Montevideo,Australia:Canberra,"
        "New Zealand:Wellington"
    ).split(",")
)
CONTINENTS = {
    "Europe": "France Germany Italy Spain Portugal England Ireland Belgium Austria Poland Hungary Greece Sweden Norway "
    "Denmark Finland Iceland Romania Bulgaria Croatia",
    "Asia": "Japan China India Thailand Vietnam Indonesia Nepal Iran Iraq",
    "Africa": "Egypt Morocco Kenya Ghana Ethiopia Senegal Tunisia Nigeria",
    "South America": "Brazil Argentina Chile Peru Colombia Ecuador Uruguay",
    "North America": "Canada Mexico Cuba",
}
LANGUAGES = dict(
    pair.split(":")
    for pair in (
        "France:French,Germany:German,Italy:Italian,Spain:Spanish,Portugal:Portuguese,England:English,Poland:Polish,"
        "Hungary:Hungarian,Greece:Greek,Turkey:Turkish,Russia:Russian,Sweden:Swedish,Norway:Norwegian,Denmark:Danish,"
        "Japan:Japanese,China:Chinese,Thailand:Thai,Brazil:Portuguese,Mexico:Spanish,Argentina:Spanish,Austria:German,"
        "Egypt:Arabic,Morocco:Arabic,Australia:English"
    ).split(",")
)
COLORS = dict(
    pair.split(":")
    for pair in (
        "the sky:blue,grass:green,a banana:yellow,a lemon:yellow,snow:white,milk:white,coal:black,the sun:yellow,"
        "blood:red,a strawberry:red,a carrot:orange,an orange:orange,a pumpkin:orange,a frog:green,a leaf:green,"
        "the sea:blue,a cherry:red,a tomato:red,chocolate:brown,a bear:brown,a crow:black,a swan:white,a pea:green,"
        "a flamingo:pink,a pig:pink,an elephant:gray,a mouse:gray,a plum:purple,a grape:purple,gold:yellow,salt:white,"
        "a cucumber:green,a fire truck:red,a rose:red,a sunflower:yellow,a cloud:white,the night sky:black,"
        "an eggplant:purple,a fox:orange,rice:white,spinach:green,honey:golden,sand:yellow,a zebra:black and white,"
        "a panda:black and white,a penguin:black and white"
    ).split(",")
)
MIXES = {
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "gray",
}
SOUNDS = dict(
    pair.split(":")
    for pair in (
        "cow:moo,dog:woof,cat:meow,sheep:baa,pig:oink,duck:quack,horse:neigh,rooster:cock-a-doodle-doo,frog:ribbit,"
        "bee:buzz,lion:roar,owl:hoot,mouse:squeak,snake:hiss,bird:tweet,wolf:howl,crow:caw,donkey:hee-haw,"
        "turkey:gobble,hen:cluck,bear:growl,goat:baa,monkey:ooh ooh aah aah,elephant:trumpet"
    ).split(",")
)
BABIES = dict(
    pair.split(":")
    for pair in (
        "dog:puppy,cat:kitten,cow:calf,horse:foal,sheep:lamb,pig:piglet,duck:duckling,hen:chick,goat:kid,bear:cub,"
        "lion:cub,frog:tadpole,deer:fawn,kangaroo:joey,swan:cygnet,goose:gosling,owl:owlet,rabbit:kit,elephant:calf"
    ).split(",")
)
HOMES = dict(
    pair.split(":")
    for pair in (
        "bird:nest,bee:hive,fox:den,rabbit:burrow,spider:web,horse:stable,dog:kennel,bear:cave,ant:anthill,"
        "fish:water,cow:barn,pig:sty,owl:hollow tree,beaver:lodge,wolf:den,mole:hole in the ground"
    ).split(",")
)
FOODS = dict(
    pair.split(":")
    for pair in (
        "rabbit:carrots and grass,cow:grass,cat:fish and mice,dog:meat,panda:bamboo,monkey:bananas and other fruit,"
        "squirrel:nuts,bee:nectar,frog:flies,horse:hay and grass,bear:honey and berries,mouse:cheese and seeds,"
        "lion:meat,owl:mice,penguin:fish,koala:leaves,bird:seeds and worms,sheep:grass,spider:flies,elephant:leaves"
    ).split(",")
)
LEGS = {"dog": 4, "cat": 4, "bird": 2, "spider": 8, "ant": 6, "horse": 4, "bee": 6, "snake": 0, "cow": 4, "fish": 0}
LEGS |= {"person": 2, "frog": 4, "duck": 2, "octopus": 8, "fly": 6, "hen": 2, "elephant": 4, "lion": 4, "worm": 0}
OPPOSITES = (
    "hot:cold big:small up:down day:night fast:slow happy:sad open:closed in:out left:right good:bad high:low "
    "long:short old:young new:old hard:soft wet:dry light:dark loud:quiet full:empty rich:poor early:late "
    "strong:weak black:white yes:no true:false first:last near:far over:under thick:thin clean:dirty easy:hard "
    "heavy:light deep:shallow sweet:sour begin:end win:lose push:pull give:take buy:sell laugh:cry love:hate "
    "summer:winter north:south east:west before:after always:never inside:outside warm:cool brave:afraid "
    "asleep:awake hello:goodbye tall:short wide:narrow smooth:rough safe:dangerous start:stop"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
SEASONS = "spring summer autumn winter".split()
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
GROUPS = {
    "fruit": "apple banana orange pear grape cherry plum lemon peach mango strawberry melon kiwi",
    "vegetable": "carrot potato onion tomato cucumber pea bean cabbage pumpkin spinach radish",
    "animal": "dog cat cow horse fox rabbit lion tiger bear mouse pig sheep goat elephant monkey duck",
    "color": "red blue green yellow orange purple pink brown black white gray",
    "bird": "owl crow duck swan robin eagle penguin parrot hen goose",
    "tool": "hammer saw drill wrench shovel axe rake screwdriver",
    "vehicle": "car bus train bicycle boat truck airplane tram",
    "flower": "rose tulip daisy lily sunflower violet orchid",
    "musical instrument": "piano guitar violin drum flute trumpet harp",
    "piece of clothing": "shirt hat coat sock shoe scarf dress glove",
    "shape": "circle square triangle rectangle star oval",
    "sport": "soccer tennis basketball swimming running golf hockey",
}
PLURALS = {"piece of clothing": "pieces of clothing"}
SIDES = {"triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "octagon": 8}
DEFINITIONS = dict(
    pair.split(":")
    for pair in (
        "a fox:a wild animal with red fur and a bushy tail,a dog:an animal that many people keep as a pet,"
        "a cat:a small animal with soft fur that says meow,a tree:a tall plant with a trunk and leaves,"
        "a river:a long stream of water that flows to the sea,the sun:the star that gives us light and warmth,"
        "the moon:a big ball of rock that goes around the Earth,a star:a hot ball of gas far away in the sky,"
        "a book:a set of pages that you can read,a house:a building where people live,a school:a place where children learn,"
        "a teacher:a person who helps others learn,a doctor:a person who helps sick people,rain:water that falls from clouds,"
        "snow:frozen water that falls in white flakes,a mountain:a very high piece of land,an island:land with water all around it,"
        "the sea:a very big body of salt water,a bird:an animal with wings and feathers,a fish:an animal that lives in water,"
        "a computer:a machine that works with information,a robot:a machine that can do work by itself,"
        "a friend:a person you like and trust,music:sounds that are nice to hear,bread:food made of flour and water,"
        "a car:a machine with four wheels that takes people from place to place,a clock:a thing that shows the time,"
        "a desert:a very dry place with a lot of sand,a forest:a place with many trees,a bee:an insect that makes honey,"
        "a farmer:a person who grows food,a king:a man who rules a country,a queen:a woman who rules a country,"
        "a planet:a big round body that goes around a star,the Earth:the planet we live on,ice:frozen water,"
        "a volcano:a mountain that can throw out hot rock and fire,a cloud:many tiny drops of water in the sky,"
        "gold:a shiny yellow metal,a city:a place where many people live and work,a baker:a person who makes bread,"
        "a language model:a program that guesses the next word of a text,a library:a place with many books"
    ).split(",")
)
SPELL = (
    "cat dog sun book tree house apple water bread green happy table chair mouse horse river train light night music "
    "school friend flower garden orange yellow summer winter monkey rabbit banana cookie window pencil paper"
).split()
RHYMES = (
    "cat:hat dog:frog sun:run tree:bee house:mouse star:car moon:spoon day:play night:light ball:tall fish:dish "
    "king:ring cake:lake boat:goat bear:chair fox:box rain:train bed:red book:look nose:rose sea:tea"
).split()
CITIES = [*sorted(set(CAPITALS.values())), "New York", "Chicago", "Milan", "Munich", "Barcelona", "Osaka", "Mumbai"]
CITIES += [
    "San Francisco",
    "Los Angeles",
    "Las Vegas",
    "Sydney",
    "Toronto",
    "Boston",
    "Lagos",
    "Porto",
    "Hamburg",
    "Geneva",
    "Zurich",
    "Dallas",
    "Seattle",
]
UNKNOWN = (
    "quantum physics,black holes,the stock market,Roman law,machine learning,the theory of relativity,chess openings,"
    "medieval history,photosynthesis,democracy,Java,Python,Linux,blockchain,inflation,opera,jazz,Shakespeare,Hamlet,"
    "Napoleon,Einstein,Mozart,Picasso,the French Revolution,the Second World War,algebra,calculus,chemistry,DNA,atoms,"
    "electricity,magnets,gravity,engines,satellites,vaccines,taxes,insurance,philosophy,Plato,Buddhism,the economy,"
    "climate change,nuclear power,the internet,encryption,databases,compilers,sorting algorithms,neural networks,"
    "the human brain,the heart,the immune system,dinosaurs,fossils,earthquakes,tides,the Great Wall,the pyramids,"
    "the Olympic Games,football clubs,movie stars,Bitcoin,car repair,tax law,sushi recipes,wine,the Renaissance,"
    "superconductors,probability,statistics,geometry,poker,politics,elections,the Roman Empire,Vikings,samurai,"
    "architecture,poetry,linguistics,psychology,economics,biology,astronomy,robotics,operating systems,networks"
).split(",")
