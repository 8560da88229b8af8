#!/usr/bin/env bash
# From a corpus to a deployed student, also one for browsers: back-translation, teacher, distillation, student, int8
# export, scores.
#
#   recipes/pipeline.sh DATA MONO WORK
#
# DATA: folder with train, valid and test, each as .SOURCE and .TARGET. MONO: text of the target language, one
# sentence a line. WORK: folder for all results: run directories, folders of text files, and scores/*.json.
#
# A step that is done is skipped, and one that was interrupted goes on, also after SIGKILL: start the same command
# again. Settings are environment variables; WORK remembers them, since steps that are done have used them.
set -euo pipefail

if [ $# -ne 3 ]; then
    echo "error: usage: recipes/pipeline.sh DATA MONO WORK" >&2
    exit 2
fi
data=$1 mono=$2 work=$3

: "${PYTHON:=python}"                # the Python that has the package
: "${SOURCE:=de}" "${TARGET:=en}"    # languages, as the names of the files have them
: "${CONFIG:=multi30k_de_en}"        # recipe or file: the config of the teacher and of the reverse model
: "${TAG:=<BT>}"                     # symbol before back-translated sources
: "${TRAIN_FLAGS:=}"                 # flags of all trainings, such as --config.train.steps=3000
: "${TEACHER_FLAGS:=}"               # flags of the teacher's training alone
: "${STUDENT_FLAGS:=--config.model.num_encoder_layers=6 --config.model.num_decoder_layers=1 --config.model.model_dim=128 --config.model.ffn_dim=512 --config.model.dropout_rate=0.1}"
: "${BACKTRANSLATE_FLAGS:=}"         # such as --method=sample --top_k=10
: "${DISTIL_FLAGS:=}"                # such as --targets=best
: "${MORE_SOURCES:=}"                # more that the teacher translates for the student: a file of source text, or
                                     # backtranslated, the sources that the reverse model made of MONO
: "${FORMAT:=ctranslate2}"           # of the student's export; bergamot: for browsers, with an SSRU decoder and a shortlist
: "${QUANTIZATION:=int8}"            # of the student's export; empty: no export

[ -d "$data" ] || { echo "error: the data folder $data does not exist" >&2; exit 2; }
[ -f "$mono" ] || { echo "error: the text $mono does not exist" >&2; exit 2; }
for split in train valid test; do
    for language in "$SOURCE" "$TARGET"; do
        [ -f "$data/$split.$language" ] || { echo "error: $data/$split.$language does not exist" >&2; exit 2; }
    done
done
[ -z "$MORE_SOURCES" ] || [ "$MORE_SOURCES" = backtranslated ] || [ -f "$MORE_SOURCES" ] || {
    echo "error: MORE_SOURCES is $MORE_SOURCES, which is no file; give one of source text, or backtranslated" >&2
    exit 2
}
[ "$FORMAT" = ctranslate2 ] || [ "$FORMAT" = bergamot ] || {
    echo "error: FORMAT is $FORMAT; give ctranslate2 or bergamot" >&2
    exit 2
}
mkdir -p "$work/scores" "$work/distilled"

# Commands inherit the lock: if only this script was killed, the next one waits for the command it had begun.
if command -v flock > /dev/null; then
    exec 9> "$work/.lock"
    flock -n 9 || { echo "waiting for another pipeline, or for its last command, in $work" >&2; flock 9; }
fi

# Writes what it reads to a file, completely or not at all.
write() {
    cat > "$1.partial" && mv "$1.partial" "$1"
}

settings=$(printf '%s\n' "data=$data" "mono=$mono" "languages=$SOURCE-$TARGET" "config=$CONFIG" "tag=$TAG" \
    "train=$TRAIN_FLAGS" "teacher=$TEACHER_FLAGS" "student=$STUDENT_FLAGS" \
    "backtranslate=$BACKTRANSLATE_FLAGS" "distil=$DISTIL_FLAGS" "quantization=$QUANTIZATION")
[ -z "$MORE_SOURCES" ] || settings+=$(printf '\n%s' "more_sources=$MORE_SOURCES")
[ "$FORMAT" = ctranslate2 ] || settings+=$(printf '\n%s' "format=$FORMAT")
if [ ! -e "$work/settings.txt" ]; then
    echo "$settings" | write "$work/settings.txt"
elif [ "$settings" != "$(cat "$work/settings.txt")" ]; then
    echo "error: $work was made with other settings (< then, > now); set them back, or give another WORK" >&2
    diff "$work/settings.txt" <(echo "$settings") >&2 || true
    exit 2
fi

# step FILE COMMAND...: runs a command of the package, unless FILE, which it writes last, is there.
step() {
    local file=$1
    shift
    if [ -e "$file" ]; then
        echo "done: $file" >&2
        return
    fi
    echo "run: $*" >&2
    "$PYTHON" -m flaxformer_mt "$@" > "$work/output.json"
    [ -e "$file" ] || mv "$work/output.json" "$file"  # a command that only prints its result
}

languages=(--config.data.source_language="$SOURCE" --config.data.target_language="$TARGET")
reversed=(--config.data.source_language="$TARGET" --config.data.target_language="$SOURCE")
common=(--config="$CONFIG" --config.data.text_dir="$data" --config.data.clean.duplicates=drop)
symbols=()
[ -z "$TAG" ] || symbols=(--config.vocab.symbols="$TAG")
# Flags with spaces inside a value are not supported: each word of a setting is a flag.
# shellcheck disable=SC2206
train=($TRAIN_FLAGS) teacher=($TEACHER_FLAGS) student=($STUDENT_FLAGS)
# shellcheck disable=SC2206
search=($BACKTRANSLATE_FLAGS) distil=($DISTIL_FLAGS)

# 1. The corpus: what cleaning leaves out, and what the vocabulary is.
step "$work/corpus.json" prepare "${common[@]}" "${languages[@]}" "${train[@]}" --json

# 2. The model of the reverse direction, and its translations of the text.
step "$work/reverse/report.json" train "${common[@]}" "${reversed[@]}" "${train[@]}" --run="$work/reverse"
step "$work/backtranslated/report.json" backtranslate --run="$work/reverse" --input="$mono" \
    --output="$work/backtranslated" --tag="$TAG" --resume "${search[@]}"

# 3. The teacher, on real and back-translated pairs.
step "$work/teacher/report.json" train "${common[@]}" "${languages[@]}" "${symbols[@]}" \
    --config.data.dataset="parallel_text,parallel_text@$work/backtranslated" \
    "${train[@]}" "${teacher[@]}" --run="$work/teacher"

# 4. Its translations of the training sources, and of more sources, if these are wanted: of the n best those that are
# closest to the references. Sources without references get the best one, for which flags of that choice have no use.
distil_to() {
    local folder=$1 sources=$2 references=${3:-} flags=("${distil[@]}")
    if [ -z "$references" ]; then
        mapfile -t flags < <(printf '%s\n' "${distil[@]}" |
            grep -v -e '^--targets=nbest$' -e '^--n_best=' -e '^--metric=' -e '^$')
    elif [[ " $DISTIL_FLAGS " != *" --targets=best "* ]]; then
        flags+=(--targets=nbest --reference="$references")
    fi
    step "$folder/report.json" distil --run="$work/teacher" --input="$sources" --output="$folder" --resume "${flags[@]}"
}
distil_to "$work/distilled" "$data/train.$SOURCE" "$data/train.$TARGET"
dataset=parallel_text
if [ -n "$MORE_SOURCES" ]; then
    more=("$MORE_SOURCES")
    [ "$MORE_SOURCES" != backtranslated ] || more=("$work/backtranslated/translations.txt" "$mono")
    distil_to "$work/distilled_more" "${more[@]}"
    dataset+=,parallel_text@$work/distilled_more
fi
for split in valid test; do
    for language in "$SOURCE" "$TARGET"; do
        [ -e "$work/distilled/$split.$language" ] || write "$work/distilled/$split.$language" \
            < "$data/$split.$language"
    done
done

# 5. The student, on these pairs alone, with the teacher's vocabulary.
models=$work/teacher/vocab
vocabulary=(--config.vocab.source_model="$models/source.model" --config.vocab.target_model="$models/target.model")
[ ! -e "$models/joint.model" ] || vocabulary=(--config.vocab.source_model="$models/joint.model")
network=()
[ "$FORMAT" != bergamot ] || network=(--config.model.decoder_self_attention=ssru --config.model.norm_position=post \
    --config.model.positions=sinusoidal_halves --config.model.norm_epsilon=1e-6 \
    --config.model.target_start=zeros --config.search.method=greedy)
learner=(--config="$CONFIG" "${languages[@]}" \
    --config.data.dataset="$dataset" --config.data.text_dir="$work/distilled" \
    "${vocabulary[@]}" "${network[@]}" "${train[@]}" "${student[@]}")
step "$work/student/report.json" train "${learner[@]}" --run="$work/student"

# 6. The student for CTranslate2 or for browsers, and the scores of all models on the test set.
export=(export --run="$work/student" --format="$FORMAT" --quantization="$QUANTIZATION" --output="$work/exported")
if [ "$FORMAT" = bergamot ] && [ -n "$QUANTIZATION" ]; then
    step "$work/shortlist.txt" prepare "${learner[@]}" --shortlist="$work/shortlist.txt"
    step "$work/exported/registry.json" "${export[@]}" --shortlist="$work/shortlist.txt"
elif [ -n "$QUANTIZATION" ]; then
    step "$work/exported/model.bin" "${export[@]}"
fi
for name in reverse teacher student; do
    step "$work/scores/$name.json" evaluate --run="$work/$name" --split=test
done
rm -f "$work/output.json"
echo "all steps are done: scores in $work/scores" >&2
