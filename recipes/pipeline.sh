#!/usr/bin/env bash
# From a corpus to a small model for browsers or CPUs: the commands that `new --for=browser` prints, from the teacher
# to the export, and scores. With text of the target language, the teacher also learns from its back-translation.
#
#   recipes/pipeline.sh DATA WORK
#
# DATA: folder with train.SOURCE and train.TARGET; without valid and test files, pairs are held out. WORK: folder for
# all results: configs, run directories, text, and scores/*.json.
#
# A step that is done is skipped, and one that was interrupted goes on, also after SIGKILL: start the same command
# again. Settings are environment variables; WORK remembers them, since steps that are done have used them.
set -euo pipefail

if [ $# -ne 2 ]; then
    echo "error: usage: recipes/pipeline.sh DATA WORK; text to translate back is MONO=FILE" >&2
    exit 2
fi
data=$1 work=$2

: "${PYTHON:=python}"                # the Python that has the package
: "${SOURCE:=de}" "${TARGET:=en}"    # languages, as the names of the files have them
: "${FOR:=browser}"                  # where the student translates: browser or cpu
: "${MONO:=}"                        # text of the target language to translate back, one sentence a line
: "${MORE_SOURCES:=}"                # more source text that the teacher translates for the student
: "${TRAIN_FLAGS:=}"                 # flags of all trainings, such as --config.train.steps=3000
: "${TEACHER_FLAGS:=}" "${STUDENT_FLAGS:=}"  # flags of one training
: "${BACKTRANSLATE_FLAGS:=}"         # such as --method=sample --top_k=10
: "${DISTIL_FLAGS:=}"                # such as --n_best=8

for file in "$data/train.$SOURCE" "$data/train.$TARGET" ${MONO:+"$MONO"} ${MORE_SOURCES:+"$MORE_SOURCES"}; do
    [ -f "$file" ] || { echo "error: $file does not exist" >&2; exit 2; }
done
case $FOR in browser) format=bergamot ;; cpu) format=ctranslate2 ;;
    *) echo "error: FOR is $FOR; give browser or cpu" >&2; exit 2 ;;
esac
mkdir -p "$work/scores"

# Commands inherit the lock: if only this script was killed, the next one waits for the command it had begun.
if command -v flock > /dev/null; then
    exec 9> "$work/.lock"
    flock -n 9 || { echo "waiting for another pipeline, or for its last command, in $work" >&2; flock 9; }
fi

settings=$(printf '%s\n' "data=$data" "languages=$SOURCE-$TARGET" "for=$FOR" "mono=$MONO" "more_sources=$MORE_SOURCES" \
    "train=$TRAIN_FLAGS" "teacher=$TEACHER_FLAGS" "student=$STUDENT_FLAGS" "backtranslate=$BACKTRANSLATE_FLAGS" \
    "distil=$DISTIL_FLAGS")
if [ ! -e "$work/settings.txt" ]; then
    echo "$settings" > "$work/settings.partial" && mv "$work/settings.partial" "$work/settings.txt"
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

# Flags with spaces inside a value are not supported: each word of a setting is a flag.
# shellcheck disable=SC2206
train=($TRAIN_FLAGS) teacher=($TRAIN_FLAGS $TEACHER_FLAGS) student=($TRAIN_FLAGS $STUDENT_FLAGS)
# shellcheck disable=SC2206
search=($BACKTRANSLATE_FLAGS) distil=($DISTIL_FLAGS)
run=$work/student text=$work/student_distilled

# 1. The configs of teacher and student, and the pairs that the teacher translates again.
step "$work/new.json" new "$data/train.$SOURCE" "$data/train.$TARGET" --source_language="$SOURCE" \
    --target_language="$TARGET" --for="$FOR" --run="$run" --overwrite

# 2. With MONO: a model of the reverse direction, and its translations of the text.
if [ -n "$MONO" ]; then
    step "$work/reverse/report.json" train --config="${run}_teacher.py" --config.data.source_language="$TARGET" \
        --config.data.target_language="$SOURCE" "${train[@]}" --run="$work/reverse"
    step "$work/backtranslated/report.json" backtranslate --run="$work/reverse" --input="$MONO" \
        --output="$work/backtranslated" --resume "${search[@]}"
    teacher=(--config.data.dataset="parallel_text,parallel_text@$work/backtranslated" \
        --config.vocab.symbols="<BT>" "${teacher[@]}")
fi

# 3. The teacher, and its translations: of the n best those closest to the references.
step "${run}_teacher/report.json" train --config="${run}_teacher.py" "${teacher[@]}" --run="${run}_teacher"
step "$text/report.json" distil --run="${run}_teacher" --input="$text/original.$SOURCE" --output="$text" --resume \
    --targets=nbest --reference="$text/original.$TARGET" "${distil[@]}"
if [ -n "$MORE_SOURCES" ]; then
    step "${text}_more/report.json" distil --run="${run}_teacher" --input="$MORE_SOURCES" --output="${text}_more" --resume
    student=(--config.data.dataset="parallel_text,parallel_text@${text}_more" "${student[@]}")
fi

# 4. The student, its shortlist, its export, scores (as trained, and rounded to 8 bits), and lines a second.
step "$run/report.json" train --config="$run.py" "${student[@]}" --run="$run"
shortlist=${run}_shortlist.txt
step "$shortlist" prepare --run="$run" --shortlist="$shortlist"
step "${run}_$FOR/README.md" export --run="$run" --format="$format" --quantization=int8 --shortlist="$shortlist" \
    --output="${run}_$FOR"
for name in ${MONO:+reverse} student_teacher student; do
    step "$work/scores/$name.json" evaluate --run="$work/$name" --split=test
done
step "$work/scores/int8.json" evaluate --run="$run" --split=test --quantization=int8 --shortlist="$shortlist"
engine=(--run="$run" --quantization=int8 --shortlist="$shortlist")
[ "$FOR" = browser ] || engine=(--run="${run}_cpu" --backend=ctranslate2)
step "$work/test.$TARGET" translate "${engine[@]}" --input="$text/test.$SOURCE" --output="$work/test.$TARGET"
rm -f "$work/output.json"
du -sh "${run}_$FOR" >&2
echo "all steps are done: scores in $work/scores" >&2
