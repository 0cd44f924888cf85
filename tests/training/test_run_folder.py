import json
import multiprocessing
import time

import pytest

from asr.training.run_folder import claimed, git_commit, new_run_dir, open_run_dir, safe_name, versions, write_json


def test_runs_of_one_second_have_folders_of_their_own(tmp_path):
    def start(_):
        new_run_dir(tmp_path)

    fork = multiprocessing.get_context("fork")
    while time.time() % 1 > 0.3:
        time.sleep(0.01)
    processes = [fork.Process(target=start, args=(index,)) for index in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(list(tmp_path.iterdir())) == 5
    assert new_run_dir(tmp_path, "label").name.endswith("_label")


def test_a_used_folder_is_continued_or_refused_as_asked(tmp_path):
    folder = open_run_dir(tmp_path, "new", "auto")
    assert folder == tmp_path / "new" and folder.is_dir()
    assert open_run_dir(tmp_path, "new", "false") == folder  # nothing was trained in it
    with pytest.raises(ValueError, match="holds no checkpoint"):
        open_run_dir(tmp_path, "new", "true")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/epoch-1.pt").touch()
    assert open_run_dir(tmp_path, "new", "auto") == open_run_dir(tmp_path, "new", "true") == folder
    with pytest.raises(ValueError, match="give another run_dir or resume=auto"):
        open_run_dir(tmp_path, "new", "false")
    with pytest.raises(ValueError, match="say which run"):
        open_run_dir(tmp_path, None, "true")
    assert open_run_dir(tmp_path, None, "auto") != open_run_dir(tmp_path, None, "auto")


def test_a_folder_is_trained_in_by_one_process_at_a_time(tmp_path):
    told = pytest.raises(ValueError, match="another process is training in this folder")
    with claimed(tmp_path), told, claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass


def test_names_of_folders_are_safe():
    assert safe_name("optim.lr=1e-3,seed=2") == "optim.lr_1e-3_seed_2"
    assert "/" not in safe_name("数据 集/[a]#b") and "数据" in safe_name("数据 集/[a]#b")
    assert len(safe_name("x" * 500)) == 100 and safe_name("../..") == ""


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_json({"text": "你好"}, path)
    assert "你好" in path.read_text(encoding="utf-8") and json.loads(path.read_text()) == {"text": "你好"}
    with pytest.raises(TypeError):
        write_json({"text": object()}, path)
    assert json.loads(path.read_text()) == {"text": "你好"} and len(list(tmp_path.iterdir())) == 1


def test_what_a_result_depends_on_is_noted():
    found = versions()
    assert {"python", "torch", "lhotse", "hydra-core", "commit", "command"} <= found.keys()
    assert found["commit"] == git_commit()
