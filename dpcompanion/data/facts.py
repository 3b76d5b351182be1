"""What is publicly known of each set: classes, columns, moments, origins and checksums of files."""

DIGITS = tuple("0123456789")
CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
UTKFACE_RACES = ("White", "Black", "Asian", "Indian", "Other")
COVERTYPE_CLASSES = (
    "Spruce/Fir",
    "Lodgepole Pine",
    "Ponderosa Pine",
    "Cottonwood/Willow",
    "Aspen",
    "Douglas-fir",
    "Krummholz",
)
LANGUAGES = (
    "Arabic",
    "Chinese",
    "Czech",
    "Dutch",
    "English",
    "French",
    "German",
    "Greek",
    "Irish",
    "Italian",
    "Japanese",
    "Korean",
    "Polish",
    "Portuguese",
    "Russian",
    "Scottish",
    "Spanish",
    "Vietnamese",
)

# Per-channel (mean, sd) that other work printed long ago and everyone uses: public, no estimates.
PUBLIC_MOMENTS = {
    "mnist": ((0.1307,), (0.3081,)),
    "mnist-5k": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "utkface": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet's
}

# The documented columns of UCI Adult; a categorical one lists its values, "?" (missing) first.
ADULT_COLUMNS = {
    "age": None,
    "workclass": "? Federal-gov Local-gov Never-worked Private Self-emp-inc Self-emp-not-inc"
    " State-gov Without-pay",
    "fnlwgt": None,
    "education": "10th 11th 12th 1st-4th 5th-6th 7th-8th 9th Assoc-acdm Assoc-voc Bachelors"
    " Doctorate HS-grad Masters Preschool Prof-school Some-college",
    "education-num": None,
    "marital-status": "Divorced Married-AF-spouse Married-civ-spouse Married-spouse-absent"
    " Never-married Separated Widowed",
    "occupation": "? Adm-clerical Armed-Forces Craft-repair Exec-managerial Farming-fishing"
    " Handlers-cleaners Machine-op-inspct Other-service Priv-house-serv Prof-specialty"
    " Protective-serv Sales Tech-support Transport-moving",
    "relationship": "Husband Not-in-family Other-relative Own-child Unmarried Wife",
    "race": "Amer-Indian-Eskimo Asian-Pac-Islander Black Other White",
    "sex": "Female Male",
    "capital-gain": None,
    "capital-loss": None,
    "hours-per-week": None,
    "native-country": "? Cambodia Canada China Columbia Cuba Dominican-Republic Ecuador El-Salvador"
    " England France Germany Greece Guatemala Haiti Holand-Netherlands Honduras Hong Hungary India"
    " Iran Ireland Italy Jamaica Japan Laos Mexico Nicaragua Outlying-US(Guam-USVI-etc) Peru"
    " Philippines Poland Portugal Puerto-Rico Scotland South Taiwan Thailand Trinadad&Tobago"
    " United-States Vietnam Yugoslavia",
}
ADULT_COLUMNS = {
    column: values and tuple(values.split()) for column, values in ADULT_COLUMNS.items()
}

COVERTYPE_COLUMNS = (
    "Elevation",
    "Aspect",
    "Slope",
    "Horizontal_Distance_To_Hydrology",
    "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways",
    "Hillshade_9am",
    "Hillshade_Noon",
    "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points",
    *(f"Wilderness_Area_{i}" for i in range(1, 5)),
    *(f"Soil_Type_{i}" for i in range(1, 41)),
)

HOW_TO_GET = {
    "mnist": "put the four original files into MNIST/raw/ (train-images-idx3-ubyte.gz,"
    " train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz),"
    " or mnist.npz",
    "cifar10": "unpack cifar-10-python.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html"
    " (cifar-10-batches-py/), or put cifar10.npz there",
    "svhn": "put train_32x32.mat and test_32x32.mat of http://ufldl.stanford.edu/housenumbers"
    " there, or svhn.npz",
    "adult": "put adult.data and adult.test of https://archive.ics.uci.edu/dataset/2/adult"
    " into adult/",
    "covertype": "put covtype.data.gz of https://archive.ics.uci.edu/dataset/31/covertype"
    " into covtype/",
    "utkface": "put utkface.npz there, with arrays x (n, height, width, 3) uint8, age, gender"
    " (0 male, 1 female) and race (0 White, 1 Black, 2 Asian, 3 Indian, 4 Other), made from"
    " https://susanqq.github.io/UTKFace",
    "surnames": "put names.tsv there: a header `name<TAB>language`, then one line for each name of"
    " data/names/*.txt in https://github.com/spro/practical-pytorch",
    "imdb": "put imdb.tsv there: lines `split<TAB>label<TAB>number<TAB>stars<TAB>text` made from"
    " https://ai.stanford.edu/~amaas/data/sentiment",
}

# sha256 of decompressed contents, as their publishers serve them.
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "mnist_5k.csv": "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053",
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    "covtype.data": "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
    "names.tsv": "562b6a0f4efc85a05739c0823073606c2568003b092e20b6d1af7fd85ea8a5e0",
    "imdb.tsv": "0fba993c56d2a02efae420422dd9ad85048f626d018bc68b469e8cc4053ff3d4",
}
# sha256 of array bytes in npz files. MNIST's are those of the originals; CIFAR-10's belong to a
# copy that was put together again, 104 of whose 60000 images (`train_lossy`, `test_lossy`) are JPEG
# re-encodings.
ARRAY_SHA256 = {
    "mnist": {
        "train_x": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train_y": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "test_x": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test_y": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    },
    "cifar10": {
        "train_x": "10d94edc57bf6b034670d5061cb6ac228cfc0fd07d5ba6ba4082883c4999a6d6",
        "train_y": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "test_x": "4674ac8c77f372061aaf9216c8857c99599d5df0bb9f6b16a3de613ef8eb348a",
        "test_y": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
}
# sha256 of a whole set as `Dataset.sha256` forms it: the sets that scikit-learn installs.
SET_SHA256 = {
    "digits": "150a11cedff23fe1c89ebc8b648d2d7ee58993efee8952e64253b6044fe8c868",
    "breast_cancer": "bbcb1ea64c99475b5cb24672cae60b8f5bddbd37818cf36062b93b6830852815",
    "iris": "1514aad9de0cd65b0569947ba129d0a074378e7e607f77bf6da5ce678f9713e9",
    "wine": "d3b60c04c1fd39252ec78d79510ab4fd9220e6a4d786a720093f8d198a16aa94",
}
# The md5 that torchvision publishes.
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
URLS = {
    "adult": {
        "adult/adult.data": _UCI + "adult/adult.data",
        "adult/adult.test": _UCI + "adult/adult.test",
    },
    "covertype": {"covtype/covtype.data.gz": _UCI + "covtype/covtype.data.gz"},
}
