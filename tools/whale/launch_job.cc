#include "launch_job.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <map>
#include <memory>

#include "api.h"
#include "launch_child.h"
#include "launch_output.h"
#include "launch_ssh.h"
#include "runner.h"

namespace tool {
namespace {

constexpr int kConnecting = 8;  // to one host at a time: sshd refuses some where more than ten come at once
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kSecondsAfterSignal = 30;  // at least, for those that have not ended when the first has

std::string signal_name(int number) {
  const char* name = ::sigabbrev_np(number);
  return name == nullptr ? "signal " + std::to_string(number) : "SIG" + std::string(name);
}

bool same_file(int a, int b) {
  struct stat first {
  }, second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

// While it lives, signals that ask this process to end are read from a file. What this process was told to ignore it
// goes on ignoring, and its children too.
class Signals {
 public:
  Signals() {
    std::signal(SIGCHLD, SIG_DFL);  // one that ignores it is not told how children end
    pipe_ignored_ = std::signal(SIGPIPE, SIG_IGN) == SIG_IGN;
    sigset_t heard;
    sigemptyset(&heard);
    sigaddset(&heard, SIGCHLD);
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
      struct sigaction now {};
      if (::sigaction(number, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) sigaddset(&heard, number);
    }
    ::sigprocmask(SIG_BLOCK, &heard, &before_);
    fd_ = ::signalfd(-1, &heard, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd_ < 0) throw Failure(std::string("cannot wait for signals: ") + std::strerror(errno));
  }
  ~Signals() {
    ::close(fd_);
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
    if (!pipe_ignored_) std::signal(SIGPIPE, SIG_DFL);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  int fd() const { return fd_; }
  const sigset_t& before() const { return before_; }
  bool pipe_ignored() const { return pipe_ignored_; }
  int next() const {  // 0: none
    signalfd_siginfo info{};
    return ::read(fd_, &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  sigset_t before_{};
  bool pipe_ignored_ = false;
  int fd_ = -1;
};

struct Rank {
  const RankSpec* spec = nullptr;
  int number = 0;
  enum { kWaits, kConnects, kRuns, kEnded } state = kWaits;
  Child child;
  double answer_by = kNever;
  std::string input;  // not yet written
  Lines out, err;
  std::unique_ptr<Sink> file;
  int status = 0;     // as of wait()
  bool late = false;  // did not answer in time
};

class Job {
 public:
  Job(const std::vector<RankSpec>& specs, const JobOptions& options) : options_(options), ranks_(specs.size()) {
    for (size_t r = 0; r < specs.size(); ++r) ranks_[r].spec = &specs[r], ranks_[r].number = static_cast<int>(r);
  }
  ~Job() {
    for (Rank& rank : ranks_) {
      if (rank.child.pid > 0) {
        ::kill(-rank.child.pid, SIGKILL);
        guard_.remove(rank.child.pid);
        ::waitpid(rank.child.pid, nullptr, 0);
      }
      if (rank.file != nullptr) ::close(rank.file->fd());
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int run() {
    while (unfinished() || printing()) turn();
    if (code_ == 0 && out_.lost() != 0) code_ = 1;
    if (const int lost = out_.lost(); lost != 0 && lost != EPIPE)
      say(std::string("cannot write to the standard output: ") + std::strerror(lost) +
          ": what was printed is incomplete");
    for (const Rank& rank : ranks_) {
      if (rank.file == nullptr || rank.file->lost() == 0) continue;
      say("--output-dir: the output of " + name(rank) + " is incomplete: " + std::strerror(rank.file->lost()));
      code_ = std::max(code_, 1);
    }
    while (printing()) turn();
    return code_ != 0 && signal_ != 0 ? 128 + signal_ : code_;
  }

 private:
  bool unfinished() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.state != Rank::kEnded; });
  }
  bool printing() const { return asked_ < 2 && (out_.pending() || err_.pending()); }

  void turn() {
    start_more();
    wait();
    bool child = false;
    for (int number = 0; (number = signals_.next()) != 0;)
      if (number == SIGCHLD) {
        child = true;
      } else {
        interrupt(number);
      }
    if (child) reap();
    keep_time();
  }

  void say(const std::string& what) {
    if (err_.open_line()) err_.add("\n");
    err_.add("whale: " + what + "\n");
  }
  static std::string name(const Rank& rank) { return "rank " + std::to_string(rank.number) + " on " + rank.spec->host; }

  void start_more() {
    std::map<std::string, int> connecting;
    for (const Rank& rank : ranks_) connecting[rank.spec->host] += rank.state == Rank::kConnects;
    for (Rank& rank : ranks_) {
      if (rank.state != Rank::kWaits) continue;
      if (asked_ > 0 || ending_ != kNot) {
        rank.state = Rank::kEnded;
      } else if (!rank.spec->remote || connecting[rank.spec->host]++ < kConnecting) {
        start(rank);
      }
    }
  }

  void start(Rank& rank) {
    const bool first = rank.number == 0, files = !options_.output_dir.empty();
    const bool shows = first || options_.shown != Shown::kFirst;
    const std::string prefix =
        first || options_.shown == Shown::kAll ? "" : "[rank " + std::to_string(rank.number) + "] ";
    ChildSpec spec{rank.spec->words, rank.spec->environment};
    if (rank.spec->remote) spec.in = Stream::kPipe;
    // A terminal is handed on, so that a program sees that it has one; what it writes there comes line by line anyway.
    const bool handed = first && !files && !rank.spec->remote;
    if (handed && ::isatty(1)) spec.out = Stream::kInherit;
    if (handed && ::isatty(2)) spec.err = Stream::kInherit;
    if (!shows && !files && !rank.spec->remote) spec.out = Stream::kNull;
    if (files) rank.file = std::make_unique<Sink>(open_file(rank.number));
    rank.child = start_child(spec, guard_, signals_.before(), signals_.pipe_ignored());
    rank.out = Lines(rank.child.out), rank.err = Lines(rank.child.err);
    if (shows) rank.out.to(out_, prefix);
    rank.err.to(err_, prefix);
    for (Lines* lines : {&rank.out, &rank.err})
      if (rank.file != nullptr) lines->to(*rank.file);
    rank.state = Rank::kRuns;
    if (!rank.spec->remote) return;
    rank.state = Rank::kConnects;
    rank.answer_by = seconds_now() + options_.connect_seconds;
    rank.input = rank.spec->input;
    rank.out.begin_at(kStarted, [this, &rank](std::string_view line) {
      if (err_.open_line()) err_.add("\n");
      err_.add("[" + rank.spec->host + "] " + std::string(line));
    });
  }

  int open_file(int number) const {
    const std::string path = options_.output_dir + "/rank-" + std::to_string(number) + ".log";
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) throw Failure("--output-dir: cannot write '" + shown(path) + "': " + std::strerror(errno));
    return fd;
  }

  // For the end of a line in the other one.
  bool waits(const Sink& sink) const { return one_stream_ && (&sink == &out_ ? err_ : out_).amid(); }

  // Until something happens that there is something to do about; reads and writes what can be.
  void wait() {
    std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0}};
    std::vector<Lines*> read;
    std::vector<Sink*> written;
    std::vector<Rank*> fed;
    double until = deadline_;
    for (Rank& rank : ranks_) {
      if (rank.state == Rank::kConnects) until = std::min(until, rank.answer_by);
      if (rank.file != nullptr) rank.file->write_all();
      for (Lines* lines : {&rank.out, &rank.err})
        if (lines->wanted()) polled.push_back({lines->fd(), POLLIN, 0}), read.push_back(lines);
    }
    for (Sink* sink : {&out_, &err_})
      if (sink->pending() && !waits(*sink)) polled.push_back({sink->fd(), POLLOUT, 0}), written.push_back(sink);
    for (Rank& rank : ranks_)
      if (!rank.input.empty() && rank.child.in >= 0)
        polled.push_back({rank.child.in, POLLOUT, 0}), fed.push_back(&rank);
    const double left = until == kNever ? -1 : std::clamp((until - seconds_now()) * 1e3, 0.0, 1e9);
    if (::poll(polled.data(), polled.size(), static_cast<int>(std::ceil(left))) <= 0) return;
    size_t k = 1;
    for (Lines* lines : read)
      if (polled[k++].revents != 0) lines->read();
    for (Sink* sink : written)
      if (polled[k++].revents != 0 && !waits(*sink)) sink->write();
    for (Rank* rank : fed)
      if (polled[k++].revents != 0) feed(*rank);
    for (Rank& rank : ranks_)
      if (rank.state == Rank::kConnects && rank.out.begun()) rank.state = Rank::kRuns;
  }

  static void feed(Rank& rank) {
    const ssize_t written = ::write(rank.child.in, rank.input.data(), rank.input.size());
    if (written > 0) rank.input.erase(0, static_cast<size_t>(written));
    if (written < 0 && errno != EAGAIN && errno != EINTR) rank.input.clear();  // ssh has ended, and says why
  }

  // To the rank and what it has started.
  void send(Rank& rank, int number) {
    if (rank.child.pid <= 0) return;
    if (rank.spec->remote && rank.state == Rank::kRuns && number != SIGKILL) {
      const char* abbreviated = ::sigabbrev_np(number);
      rank.input += std::string(abbreviated == nullptr ? "TERM" : abbreviated) + "\n";
      feed(rank);
    } else {
      ::kill(-rank.child.pid, number);
    }
  }
  void send_all(int number) {
    for (Rank& rank : ranks_) send(rank, number);
  }

  void interrupt(int number) {
    ++asked_;
    if (asked_ == 1) signal_ = number;
    send_all(asked_ == 1 ? number : SIGKILL);
    if (asked_ == 1) send_all(SIGCONT);  // one that is stopped hears nothing before
    if (asked_ == 1) say(signal_name(number) + ", which all ranks got; a second one kills them");
    if (asked_ == 2) ending_ = kKilled, deadline_ = kNever;
  }

  // Ranks that have ended, with all that they have started.
  void reap() {
    std::vector<Rank*> failed;
    bool ended = false;
    for (Rank& rank : ranks_) {
      siginfo_t info{};
      if (rank.child.pid <= 0 ||
          ::waitid(P_PID, static_cast<id_t>(rank.child.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
          info.si_pid == 0)
        continue;
      ::kill(-rank.child.pid, SIGKILL);  // its number is its own until it is waited for
      guard_.remove(rank.child.pid);
      ::waitpid(rank.child.pid, &rank.status, 0);
      rank.child.pid = -1;
      ended = true;
      if (rank.child.in >= 0) ::close(rank.child.in);
      rank.out.finish();
      rank.err.finish();
      if (rank.file != nullptr) rank.file->write_all();
      if (rank.state == Rank::kConnects && rank.out.begun()) rank.state = Rank::kRuns;
      if (rank.status != 0 || rank.state == Rank::kConnects) failed.push_back(&rank);
      if (rank.state == Rank::kRuns) rank.state = Rank::kEnded;
    }
    // Of those seen together, who died of a signal did not do so because of the others.
    std::stable_sort(failed.begin(), failed.end(),
                     [](const Rank* a, const Rank* b) { return WIFSIGNALED(a->status) > WIFSIGNALED(b->status); });
    for (Rank* rank : failed) fail(*rank);
    if (ended && asked_ == 1 && ending_ == kNot) {
      ending_ = kAsked, deadline_ = seconds_now() + seconds_after_signal();
    }
  }

  // How it failed, behind its name.
  std::string failure(const Rank& rank) const {
    const int status = WEXITSTATUS(rank.status);
    const bool signaled = WIFSIGNALED(rank.status);
    std::string how =
        signaled ? "died of " + signal_name(WTERMSIG(rank.status)) : "ended with status " + std::to_string(status);
    if (!rank.spec->remote) return how;
    if (rank.late) return "was not started: the host has not answered in " + seconds(options_.connect_seconds);
    if (!rank.out.begun())
      return status == 127 ? "was not started"  // it has said why
                           : "was not started: the host does not answer to ssh without a password (ssh " + how + ")";
    if (signaled) return "has lost its ssh, which " + how;
    if (status == 255) return how + ", its own or that of a lost connection";
    return status > 128 && status < 128 + NSIG ? how + " (" + signal_name(status - 128) + ")" : how;
  }

  void fail(Rank& rank) {
    const bool started = rank.state == Rank::kEnded, first = code_ == 0;
    rank.state = Rank::kEnded;
    if (first)
      code_ = rank.late                  ? 255  // as ssh, where it gives up
              : WIFSIGNALED(rank.status) ? 128 + WTERMSIG(rank.status)
                                         : std::max(1, WEXITSTATUS(rank.status));
    if (ending_ == kTerminated || ending_ == kKilled || asked_ > 1) return;  // by us
    const auto others =
        std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.state != Rank::kEnded; });
    const double grace = started ? options_.grace_seconds : 0;
    std::string how = failure(rank);
    if (!first) how += ", after it";
    if (first && others > 0)
      how += "; " + (others == 1 ? "1 other rank gets" : std::to_string(others) + " other ranks get") + " SIGTERM" +
             (grace > 0 ? " in " + seconds(grace) : "");
    if (asked_ == 0) say(name(rank) + " " + how);
    if (ending_ == kNot && asked_ == 0) ending_ = kGrace, deadline_ = seconds_now() + grace;
  }

  double seconds_after_signal() const { return std::max(options_.grace_seconds, kSecondsAfterSignal); }
  static std::string seconds(double given) {
    std::string text = std::to_string(given);
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
    return text + (given == 1 ? " second" : " seconds");
  }

  void keep_time() {
    const double now = seconds_now();
    for (Rank& rank : ranks_) {
      if (rank.state != Rank::kConnects || rank.answer_by > now || rank.late) continue;
      rank.late = true;
      rank.answer_by = kNever;
      send(rank, SIGKILL);
    }
    if (now < deadline_) return;
    if (ending_ == kGrace) {
      send_all(SIGTERM);
      ending_ = kTerminated, deadline_ = now + std::max(1.0, options_.grace_seconds);
    } else if (ending_ == kTerminated || ending_ == kAsked) {
      const std::string what = ending_ == kTerminated ? "SIGTERM"
                                                      : signal_name(signal_) + ", nor in " +
                                                            seconds(seconds_after_signal()) + " since another one has,";
      for (const Rank& rank : ranks_)
        if (rank.state != Rank::kEnded) say(name(rank) + " has not ended on " + what + " and is killed");
      send_all(SIGKILL);
      ending_ = kKilled, deadline_ = kNever;
    }
  }

  const JobOptions& options_;
  const Guard guard_;
  const Signals signals_;
  Sink out_{1}, err_{2};
  const bool one_stream_ = same_file(1, 2);
  std::vector<Rank> ranks_;
  int asked_ = 0;   // how often a signal has asked for the end
  int signal_ = 0;  // the first that did
  int code_ = 0;
  enum { kNot, kAsked, kGrace, kTerminated, kKilled } ending_ = kNot;  // asked: by a signal of ours, and one has
  double deadline_ = kNever;                                           // of the grace, or of what a signal asked for
};

}  // namespace

int run_job(const std::vector<RankSpec>& ranks, const JobOptions& options) { return Job(ranks, options).run(); }

}  // namespace tool
