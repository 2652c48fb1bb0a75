// Checkpoints: what is written is read back; what may be replaced and what not; damage is named.
#include "checkpoint/checkpoint.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/philox.h"
#include "checkpoint/describe.h"
#include "checkpoint/save_lock.h"
#include "checkpoint_kit.h"
#include "unit/caught.h"

using namespace whale;       // NOLINT
using namespace whale::kit;  // NOLINT
namespace fs = std::filesystem;

namespace {
const std::vector<std::string> kThree = {"model.safetensors", "optimizer.safetensors", "whale.json"};
}

TEST_CASE("crc32c: known values, pieces, and both ways the same") {
  CHECK(crc32c("123456789", 9) == 0xE3069283u);
  const std::string zeros(32, '\0'), ones(32, '\xff');
  CHECK(crc32c(zeros.data(), 32) == 0x8A9136AAu);  // RFC 3720, appendix B.4
  CHECK(crc32c(ones.data(), 32) == 0x62A8AB43u);
  std::string text(1000, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(RandomStream(1, 2, 3).word(i));
  for (size_t cut = 0; cut <= 70; ++cut) {
    const uint32_t whole = crc32c(text.data() + cut, text.size() - 2 * cut);
    CHECK(whole == crc32c_by_tables(text.data() + cut, text.size() - 2 * cut));
    CHECK(whole == crc32c(text.data() + 2 * cut, text.size() - 3 * cut, crc32c(text.data() + cut, cut)));
  }
}

TEST_CASE("checkpoint: what is written is read back, and replaced as a whole") {
  const TestFolder folder(false);
  const std::string at = folder.path / "deep" / "er" / "ckpt/";
  write(at, 1);
  CHECK(read(at) == 1);
  write(at, 2);
  CHECK(read(at) == 2);
  CHECK(names_in(at) == kThree);
  CHECK(names_in(folder.path / "deep" / "er").size() == 1);  // nothing is left beside it
  CHECK(open_checkpoint(at).index.meta.learning_rate == 0.5);
}

TEST_CASE("checkpoint: a failure at any point leaves the previous one or the new one, whole") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  put(at + "/tokenizer.json", "mine");
  std::vector<std::string> points;
  write(at, 1, [&](std::string_view point) { points.emplace_back(point); });
  REQUIRE(points.size() >= 10);
  bool placed = false;
  for (const std::string& fail : points) {
    CAPTURE(fail);
    write(at, 1);
    const Error e = error_of([&] {
      write(at, 2, [&](std::string_view point) {
        if (point == fail) throw error(Code::kDataLoss, "injected at {}", point);
      });
    });
    CHECK(says(e, Code::kDataLoss, "injected"));
    placed |= fail == "in place";
    CHECK(read(at) == (placed ? 2 : 1));
    CHECK(content(at + "/tokenizer.json") == "mine");
    if (!placed) CHECK(names_in(at).size() == 4);
  }
  const std::string fresh = folder.path / "first" / "ckpt";  // a first save that fails leaves no directory
  CHECK_THROWS_AS(write(fresh, 1,
                        [](std::string_view point) {
                          if (point == "exchange") throw error(Code::kDataLoss, "injected");
                        }),
                  Error);
  CHECK(names_in(folder.path).size() == 1);
}

TEST_CASE("checkpoint: values that cannot be read leave the previous one") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  CheckpointPart broken = part({{"w", {3000, 500}}}, 2);
  broken.source = [](size_t, uint64_t offset, void*, size_t) {
    if (offset > 2 << 20) throw error(Code::kUnavailable, "the device went away");
  };
  CHECK_THROWS_AS(write_checkpoint(at, {}, broken, part({}, 2)), Error);
  CHECK(read(at) == 1);
  CHECK(names_in(at) == kThree);
}

TEST_CASE("checkpoint: a full disk is an error and the previous one stays") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  CHECK_THROWS_AS(write(at, 2), Error);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK(read(at) == 1);
  CHECK(names_in(at) == kThree);
}

TEST_CASE("a file that a full disk has no room for is called as the user does") {
  const TestFolder folder;
  const std::string path = folder.path / "model.whale", data(1 << 16, 'x');
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string message =
      message_of([&] { replace_file(path, data.data(), data.size()); }, {Code::kResourceExhausted});
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK_MESSAGE(has(message, "cannot write '" + path + "'"), message);
  CHECK(fs::is_empty(folder.path));
}

TEST_CASE("checkpoint: nothing of the user's is replaced or removed") {
  const TestFolder folder;
  const std::string at = folder.path / "X";
  // Names that an earlier libwhale used, names beside and inside, names that look like leftovers.
  const std::string id(32, 'a');
  for (const char* name : {"X.saving", "X.previous", "X"}) {
    fs::create_directory(folder.path / name);
    put(folder.path / name / "thesis.txt", "mine");
  }
  for (const std::string& name : {"model.safetensors." + id, std::string("tokenizer.json"), "whale.json." + id})
    put(folder.path / "X" / name, "mine");
  const auto before = names_in(at);
  write(at, 1);
  write(at, 2);
  CHECK(read(at) == 2);
  for (const char* name : {"X.saving", "X.previous", "X"}) CHECK(content(folder.path / name / "thesis.txt") == "mine");
  for (const std::string& name : before) CHECK(content(at + "/" + name) == "mine");
  CHECK(names_in(at).size() == before.size() + 3);
}

TEST_CASE("checkpoint: refused before anything happens") {
  const TestFolder folder;
  const auto refused = [&](const std::string& at, Code code, const std::string& words) {
    const auto before = fs::is_directory(at) ? names_in(at) : std::vector<std::string>{};
    CAPTURE(at);
    CHECK(says(error_of([&] { check_checkpoint_target(at); }), code, words));
    CHECK(says(error_of([&] { write(at, 1); }), code, words));
    if (fs::is_directory(at)) CHECK(names_in(at) == before);
  };
  const auto make = [&](const char* name) {
    fs::create_directory(folder.path / name);
    return (folder.path / name).string();
  };
  const std::string other = make("huggingface");
  put(other + "/model.safetensors", "mine");
  refused(other, Code::kFailedPrecondition, "is not part of a checkpoint");
  CHECK(content(other + "/model.safetensors") == "mine");
  const std::string json = make("json");
  put(json + "/whale.json", "{\"name\": \"a whale of mine\"}");
  refused(json, Code::kFailedPrecondition, "is not the index of a checkpoint");
  const std::string directory = make("directory");
  fs::create_directory(directory + "/optimizer.safetensors");
  refused(directory, Code::kFailedPrecondition, "not a regular file");
  const std::string lock = make("lock");
  put(lock + "/.whale.saving", "a note of mine");
  refused(lock, Code::kFailedPrecondition, "was not made by libwhale");
  CHECK(content(lock + "/.whale.saving") == "a note of mine");
  const std::string newer = make("newer");
  put(newer + "/whale.json", "{\n  \"format\": 4,\n  \"library\": \"9.1.0\"\n}\n");
  refused(newer, Code::kFailedPrecondition, "format 4, written by libwhale 9.1.0");
  put(folder.path / "file", "mine");
  refused(folder.path / "file", Code::kAlreadyExists, "not a directory");
  refused(folder.path / "file" / "below", Code::kNotFound, "file");
  fs::create_symlink("nowhere", folder.path / "link");
  refused(folder.path / "link", Code::kAlreadyExists, "leads nowhere");
  refused(folder.path / "none" / std::string(300, 'n'), Code::kInvalidArgument, "too long");
  refused("/proc/nowhere/ckpt", Code::kNotFound, "nowhere");
  refused("", Code::kInvalidArgument, "no name");
}

TEST_CASE("checkpoint: asking whether a directory can be saved to leaves it as it is") {
  const TestFolder folder;
  const std::string at = folder.path / "a" / "b";
  check_checkpoint_target(at);
  CHECK(names_in(folder.path).empty());
  write(at, 1);
  const auto before = names_in(at);
  check_checkpoint_target(at);
  CHECK(names_in(at) == before);
  const Directory held(at);
  const SaveLock under_way(held);
  check_checkpoint_target(at);
}

TEST_CASE(
    "checkpoint: asking gives nothing a name, which a process killed meanwhile would leave; what an older one left "
    "goes") {
  const TestFolder folder;
  const std::string at = folder.path / "a", id(32, 'a');
  write(at, 1);
  if (const int nameless = ::open(at.c_str(), O_TMPFILE | O_WRONLY, 0600); nameless >= 0) {
    ::close(nameless);
    const int watch = ::inotify_init1(IN_NONBLOCK);
    REQUIRE(watch >= 0);
    REQUIRE(::inotify_add_watch(watch, at.c_str(), IN_CREATE) >= 0);
    REQUIRE(::inotify_add_watch(watch, folder.path.c_str(), IN_CREATE) >= 0);
    check_checkpoint_target(at);
    check_checkpoint_target(folder.path / "b" / "c");
    char event[4096];
    CHECK(::read(watch, event, sizeof event) < 0);
    put(at + "/seen", "");
    CHECK(::read(watch, event, sizeof event) > 0);
    ::close(watch);
    fs::remove(at + "/seen");
  }
  const auto before = names_in(at);
  put(at + "/.whale.saving." + id, "");
  write(at, 2);
  CHECK(names_in(at) == before);
  for (const std::string& mine : {".whale.saving." + id + "a", std::string(".whale.saving.notes")})
    put(at + "/" + mine, "");
  put(at + "/.whale.saving." + id, "mine");
  write(at, 3);
  CHECK(names_in(at).size() == before.size() + 3);
}

TEST_CASE("checkpoint: a directory that another save is making is a directory") {
  const TestFolder folder;
  const std::string at = folder.path / "a";
  std::atomic<bool> end = false;
  std::thread other([&] {
    while (!end) {
      ::mkdir(at.c_str(), 0777);
      ::rmdir(at.c_str());
    }
  });
  int taken = 0;
  for (int i = 0; i < 20000; ++i) {
    try {
      check_checkpoint_target(at);
    } catch (const Error& e) {  // it went away again: not found
      taken += e.code() == Code::kAlreadyExists;
    }
  }
  end = true;
  other.join();
  CHECK(taken == 0);
}

TEST_CASE("checkpoint: the working directory, a link and a mount point are places like any other") {
  const TestFolder folder;
  const fs::path before = fs::current_path();
  fs::create_directory(folder.path / "work");
  put(folder.path / "work" / "train.py", "mine");
  fs::current_path(folder.path / "work");
  for (const char* here : {".", "./", "../work", "sub/.."}) {
    CAPTURE(here);
    if (std::string(here) == "sub/..") fs::create_directory("sub");
    write(here, 1);
    CHECK(read(here) == 1);
    CHECK(content("train.py") == "mine");
  }
  fs::create_directory(folder.path / "gone");
  fs::current_path(folder.path / "gone");
  fs::remove(folder.path / "gone");
  for (const auto& ask : {std::function<void()>([] { check_checkpoint_target("x"); }), {[] { write("x", 1); }}})
    CHECK(says(error_of(ask), Code::kNotFound, "'x' is a path from the working directory, and that cannot be found"));
  write(folder.path / "from the root", 1);
  fs::current_path(before);
  fs::create_directory_symlink(folder.path / "work", folder.path / "link");
  write(folder.path / "link", 3);
  CHECK(read(folder.path / "work") == 3);
  CHECK(fs::is_symlink(folder.path / "link"));
  // /dev/shm is a mount point with everybody's files in it; a mount of our own needs rights.
  fs::create_directory(folder.path / "mount");
  if (::mount("none", (folder.path / "mount").c_str(), "tmpfs", 0, "size=1m") == 0) {
    put(folder.path / "mount" / "lost+found", "mine");
    write(folder.path / "mount", 1);
    write(folder.path / "mount", 2);
    CHECK(read(folder.path / "mount") == 2);
    CHECK(content(folder.path / "mount" / "lost+found") == "mine");
    ::umount((folder.path / "mount").c_str());
  }
}

TEST_CASE("checkpoint: files that lack or are cut are errors; a damaged checkpoint is replaced") {
  const TestFolder folder;
  CHECK(says(error_of([&] { open_checkpoint(folder.path / "nothing"); }), Code::kNotFound, "no checkpoint directory"));
  CHECK(says(error_of([&] { open_checkpoint(folder.path); }), Code::kNotFound, "no whale.json"));
  const std::string at = folder.path / "ckpt";
  for (const std::string& file : kThree) {
    for (const size_t keep : {size_t{0}, size_t{5}, size_t{40}}) {
      write(at, 1);
      fs::resize_file(fs::path(at) / file, keep);
      CHECK(says(error_of([&] { open_checkpoint(at); }), Code::kDataLoss, file));
    }
    write(at, 1);
    fs::remove(fs::path(at) / file);
    const bool index = file == "whale.json";
    CHECK(says(error_of([&] { open_checkpoint(at); }), index ? Code::kNotFound : Code::kDataLoss, file));
    CHECK(says(error_of([&] { open_checkpoint(at); }), index ? Code::kNotFound : Code::kDataLoss,
               index ? "holds no checkpoint" : "whale.json describes has lost it"));
  }
  CHECK(says(error_of([&] { open_checkpoint(at + "/model.safetensors"); }), Code::kNotFound, "it is a file"));
}

TEST_CASE("checkpoint: a flipped byte anywhere is data loss that names file and tensor") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  const RandomStream random(1, hash_name("flip"), 0);
  uint64_t draws = 0;
  for (const std::string& file : kThree) {
    const std::string good = content(fs::path(at) / file);
    const size_t header =
        file == kThree[2] ? good.size() : 8 + static_cast<uint8_t>(good[0]) + 256 * static_cast<uint8_t>(good[1]);
    for (size_t i = 0; i < good.size(); i += i < header ? 1 : 13) {
      CAPTURE(file);
      CAPTURE(i);
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 + random.word(draws++) % 255));
      put(fs::path(at) / file, bad);
      const Error e = error_of([&] { open_checkpoint(at).verify(); });
      REQUIRE(says(e, Code::kDataLoss, file));
      if (i >= header)
        REQUIRE(says(e, Code::kDataLoss,
                     file == kThree[1]   ? "tensor 'w/m'"
                     : i < header + 6000 ? "tensor 'w'"
                                         : "tensor 'b'"));
    }
    put(fs::path(at) / file, good);
  }
  CHECK(read(at) == 1);
}

TEST_CASE("checkpoint: numbers that no session has are refused, whatever the checksum says") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  const auto refused = [&](int64_t iteration, double rate) {
    CheckpointIndex index = open_checkpoint(at).index;
    index.meta.iteration = index.meta.updates = iteration;
    index.meta.learning_rate = rate;
    return message_of([&] { parse_index(at + "/whale.json", to_text(index)); }, {Code::kDataLoss});
  };
  CHECK(refused(kMostIterations, 1e30).empty());
  for (const int64_t iteration : {kMostIterations + 1, INT64_MAX})
    CHECK(has(refused(iteration, 0), fmt::format("its iteration is {}, expected 0 to 9007199254740992", iteration)));
  CHECK(has(refused(1, 1e300), "its learning_rate is 1e+300, expected 0 to 1e+30"));
}

TEST_CASE("checkpoint: files of two saves do not make one") {
  const TestFolder folder;
  const std::string a = folder.path / "a", b = folder.path / "b";
  for (const std::string& file : kThree) {
    write(a, 1);
    write(b, 1);
    fs::copy_file(fs::path(b) / file, fs::path(a) / file, fs::copy_options::overwrite_existing);
    CHECK(says(error_of([&] { open_checkpoint(a); }), Code::kDataLoss, "is not of the save"));
  }
}

TEST_CASE("checkpoint: format 1 is read, and replaced; a newer one is refused with both versions") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  const Directory there(at);
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    there.remove(file);
    const bool model = std::string(file) == "model.safetensors";
    write_safetensors(there, file,
                      model ? part({{"w", {300, 5}}, {"b", {5}}}, 4).tensors : part({{"w/m", {300, 5}}}, 4).tensors,
                      {{"format", "pt"}}, part({}, 4).source);
  }
  put(at + "/whale.json",
      "{\n  \"format\": 1,\n  \"model\": \"model\",\n  \"seed\": 7,\n  \"iteration\": 4,\n  \"updates\": 1,\n  "
      "\"learning_rate\": null\n}\n");
  CHECK(read(at) == 4);
  CHECK_FALSE(open_checkpoint(at).has_checksums());
  CHECK(describe(open_checkpoint(at)).find("without checksums") != std::string::npos);
  write(at, 5);
  CHECK(read(at) == 5);
  CHECK(describe(open_checkpoint(at)).find("every checksum is right") != std::string::npos);
  put(at + "/whale.json", "{\n  \"format\": 4,\n  \"library\": \"9.1.0\"\n}\n");
  const Error e = error_of([&] { open_checkpoint(at); });
  CHECK(says(e, Code::kFailedPrecondition, "format 4, written by libwhale 9.1.0"));
  CHECK(says(e, Code::kFailedPrecondition, "libwhale 0.2.0, which reads formats 1 to 3"));
}

TEST_CASE("files: what is no regular file is refused by every reader and not waited for") {
  const TestFolder folder;
  const auto at = [&](const char* name) { return (folder.path / name).string(); };
  REQUIRE(::mkfifo(at("pipe").c_str(), 0666) == 0);
  fs::create_directory(at("directory"));
  const int listening = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, at("socket").c_str(), sizeof address.sun_path - 1);
  REQUIRE(::bind(listening, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  for (const auto& [path, word] :
       {std::pair(at("pipe"), "a pipe"), std::pair(at("socket"), "a socket"), std::pair(at("directory"), "a directory"),
        std::pair(std::string("/dev/zero"), "a device")}) {
    CHECK(says(error_of([&, &path = path] { const InputFile file(path); }), Code::kInvalidArgument, word));
    CHECK(says(error_of([&, &path = path] { const SafetensorsFile file(path); }), Code::kInvalidArgument, word));
    CHECK(says(error_of([&, &path = path] { replace_file(path, "x", 1); }), Code::kInvalidArgument, word));
    for (const std::string& file : kThree) {
      const std::string ckpt = at("ckpt");
      write(ckpt, 1);
      fs::remove(ckpt + "/" + file);
      fs::create_symlink(path, ckpt + "/" + file);
      CHECK(says(error_of([&] { open_checkpoint(ckpt); }), Code::kInvalidArgument, word));
      fs::remove_all(ckpt);
    }
  }
  ::close(listening);
}

TEST_CASE("safetensors: headers that lie") {
  const auto parse = [](const std::string& header, uint64_t data) {
    return parse_safetensors_header("f", header.data(), header.size(), data);
  };
  CHECK(parse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8).size() == 1);
  for (
      const char* bad :
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}})",
       R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}})",
       R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", R"({"a":{"dtype":"F32","shape":[2]}})", R"([])",
       R"({"a":1})", R"({)",
       R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(parse(bad, 8), Error);
  }
}
