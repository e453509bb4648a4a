"""Words that shell tasks are made of, cut into disjoint pools for train, dev and held-out splits.

Every pool is cut by position: of five neighbours three go to `train`, one to `dev`, one to `heldout`. So no file name,
person, item or sentence of a held-out task was ever seen in training. `unseen` tasks (kinds never trained on) use the
held-out pools.
"""

POOLS = {
    # Names of files and folders.
    "stem": """
        notes report budget recipe letter diary agenda minutes summary outline invoice receipt schedule journal memo
        contacts shopping chapter poem story essay draft review survey manual guide readings lecture homework exam
        itinerary tickets packing visitors members roster payroll orders stock prices sales returns shipping supplies
        catalog inventory ledger accounts expenses income taxes loans rent insurance contract policy terms charter
        garden weather harvest animals birds flowers trees rivers planets rocks insects fossils tides seasons clouds
        music playlist lyrics concert theatre movies games scores puzzles chess league players match training medals
        server network backup deploy release changes issues errors access metrics alerts storage cluster builds cache
        family birthdays photos holiday wedding guests dinner lunch menu pantry kitchen furniture repairs tools paint
        museum library archive exhibit paintings coins stamps maps atlas voyage harbour station airport timetable routes
        clinic patients doses samples results trial protocol genes cells proteins enzymes sensors readouts probes lenses
    """,
    "folder": """
        docs data reports papers letters drafts exports imports records archive2023 archive2024 inbox outbox office home
        projects finance travel health school sports hobbies stories articles research lab fieldwork surveys meetings
        clients vendors partners staff teams north south east west central spring summer autumn winter holidays
        alpha beta gamma delta omega red blue green yellow orange morning evening weekly monthly yearly
        shelf drawer cabinet folder1 folder2 box crate basket locker vault studio workshop barn cellar attic
    """,
    "noun": """
        cat dog horse rabbit fox owl duck goose lamb pony river lake forest meadow valley bridge tower castle garden
        window door lamp table chair kettle basket ladder hammer bucket blanket pillow mirror clock candle bottle
        wagon train ferry bicycle tractor balloon rocket engine wheel anchor compass lantern telescope camera
        baker farmer sailor painter teacher doctor singer dancer pilot gardener tailor miller potter weaver
        apple pear plum cherry lemon melon grape walnut pumpkin carrot potato onion pepper mushroom
        violin piano drum flute trumpet guitar postcard parcel pocket button ribbon needle thread feather
    """,
    "adjective": """
        quick slow bright dark warm cold gentle rough quiet loud small large narrow wide early late fresh stale sweet
        bitter clever patient honest proud shy brave calm eager gloomy merry lazy busy curious careful clumsy graceful
        golden silver purple scarlet crimson amber ivory dusty muddy rainy sunny windy frosty misty foggy snowy
        wooden broken hidden empty heavy light round square crooked straight hollow solid smooth sharp tiny giant
        ancient modern famous humble distant local foreign royal secret public
    """,
    "verb": """
        sleeps waits sings shines falls rises grows rests turns moves stops starts returns travels wanders listens
        laughs works plays dances hides drifts floats stands leans rolls slides jumps climbs dives swims flies
        hums glows trembles whispers rattles echoes fades lingers
    """,
    "place": """
        upstairs downstairs outside indoors nearby overseas abroad underground downtown uptown
        by_the_sea in_the_park near_the_gate behind_the_barn under_the_oak on_the_hill across_the_road beside_the_well
        at_the_market after_the_storm before_dawn at_midnight every_morning on_sunday in_winter during_lunch
        along_the_coast beyond_the_wall over_the_roof through_the_fog around_the_corner below_the_stairs
        inside_the_tent above_the_shop past_the_mill until_evening with_a_friend without_a_sound
        like_a_feather for_an_hour once_a_week twice_a_day since_may till_noon from_afar in_silence
    """,
    "person": """
        anna bruno carla david elena felix greta hugo irene jonas karin lukas maria nils olga paul rosa simon tanja
        viktor wanda xenia yusuf zoe amina boris chen diego esther farid gina hassan ines jamal keiko leon mina noor
        oscar priya quentin rafael sofia tariq ursula vera walter ximena yara zlatan adele benny clara dora emil
        fiona george hilda ivan judith konrad lotte martin nadia otto petra ruben silvia thomas ulrich vivian werner
    """,
    "city": """
        paris london madrid rome vienna prague oslo dublin lisbon athens berlin warsaw helsinki zagreb riga
        cairo tunis nairobi lagos accra dakar harare lusaka kigali rabat delhi mumbai tokyo osaka seoul
        beijing hanoi manila jakarta bangkok lima quito bogota caracas santiago havana toronto montreal boston
        chicago denver seattle austin dallas miami sydney perth auckland suva apia geneva zurich munich turin porto
    """,
    "item": """
        bread milk butter cheese eggs flour sugar salt rice beans pasta olives honey coffee tea juice water
        soap towels paper pencils erasers rulers staples folders envelopes scissors glue markers crayons chalk
        nails screws bolts washers hinges brackets wire rope tape sandpaper brushes rollers buckets gloves
        shirts socks shoes hats scarves belts coats jackets trousers sweaters boots sandals mittens
        lamps bulbs batteries cables plugs chargers speakers headphones keyboards monitors printers
    """,
    "key": """
        port host timeout retries workers threads level theme language region width height depth margin padding
        colour font size volume speed delay interval limit quota rate budget_limit owner group title subject sender
        path prefix suffix pattern encoding format mode target source backend driver engine_name schema table_name
        username realm domain proxy gateway channel queue topic bucket_name cache_size pool_size batch_size
    """,
    "unicode": "café naïve résumé über niño Łódź piñata façade jalapeño Zürich crème señor straße fiancée ångström",
}
SPLITS_BY_PLACE = ("train", "train", "train", "dev", "heldout")


def pool(name: str, split: str) -> list[str]:
    """Return the words of pool `name` that tasks of `split` may use."""
    wanted = "heldout" if split == "unseen" else split
    words = POOLS[name].split()
    return [
        w.replace("_", " ") if name == "place" else w for k, w in enumerate(words) if SPLITS_BY_PLACE[k % 5] == wanted
    ]
