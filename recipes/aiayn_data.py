"""The pickle for translate.py of attention-is-all-you-need-pytorch: aiayn_data.py EXPORT FILE PICKLE"""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace as Space

from sentencepiece import SentencePieceProcessor

model = SentencePieceProcessor(model_file=f"{sys.argv[1]}/vocab/source.model")  # or joint.model
pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
pieces[model.pad_id()] = "<blank>"  # the project's spelling; <s>, </s> and <unk> are its own
numbers = {piece: number for number, piece in enumerate(pieces)}
field = Space(vocab=Space(itos=pieces, stoi=numbers), unk_token="<unk>")
lines = Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
examples = [Space(src=[*model.encode(line, out_type=str), "</s>"], trg=[]) for line in lines]
Path(sys.argv[3]).write_bytes(pickle.dumps({"vocab": {"src": field, "trg": field}, "test": examples}))
