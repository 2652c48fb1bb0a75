// launch: a program as several processes that find each other by torchrun's variables.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "api.h"
#include "commands.h"
#include "launch_hosts.h"
#include "launch_job.h"
#include "launch_ssh.h"

namespace tool {
namespace {

struct Launch {
  int64_t processes = 0, port = 0;
  std::string hosts, address, output = "prefix", output_dir;
  std::vector<std::string> environment;
  double grace = 5, connect_timeout = 30;
};

void random_bytes(void* to, size_t count) {
  if (::getrandom(to, count, 0) != static_cast<ssize_t>(count))
    throw Failure(std::string("no random bytes: ") + std::strerror(errno));
}

std::string new_token() {
  unsigned char bytes[16];
  random_bytes(bytes, sizeof bytes);
  std::string token;
  for (const unsigned char byte : bytes) token += "0123456789abcdef"[byte >> 4], token += "0123456789abcdef"[byte & 15];
  return token;
}

// One that is free on this machine: any for 0.
uint16_t local_port(uint16_t wanted) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(wanted);
  socklen_t size = sizeof address;
  const bool bound = fd >= 0 && ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                     ::bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!bound && wanted != 0)
    throw Failure("--port: " + std::to_string(wanted) + " cannot be listened to here: " + std::strerror(error) +
                  "; give another, or leave it out for one that is free");
  if (!bound) throw Failure(std::string("no port is free: ") + std::strerror(error));
  return ntohs(address.sin_port);
}

// On another host, of which is not known what is free: below those that systems give to outgoing connections.
uint16_t random_port() {
  uint16_t random = 0;
  random_bytes(&random, sizeof random);
  return static_cast<uint16_t>(20000 + random % 10000);
}

std::string this_host() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

// NAME=VALUE, of NAME alone with the value that it has here.
std::string variable(const std::string& given) {
  const std::string name = given.substr(0, given.find('='));
  const auto letter = [](char c) { return c == '_' || ((c | 32) >= 'a' && (c | 32) <= 'z'); };
  if (name.empty() ||
      !std::all_of(name.begin(), name.end(), [&](char c) { return letter(c) || (c >= '0' && c <= '9'); }) ||
      !letter(name[0]))
    throw Failure("--env: '" + shown(given) + "', expected NAME=VALUE, or NAME alone");
  if (name.size() < given.size()) return given;
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) throw Failure("--env: '" + shown(name) + "' is not set here; give it a value: NAME=VALUE");
  return name + "=" + value;
}

constexpr const char* kRecorder = "WHALE_FLIGHT_RECORDER";

// Where ranks that end with an error leave their flight records, unless the user says where: "" then.
std::string records_of(const Launch& launch) {
  const std::string name = kRecorder;
  const bool given = std::ranges::any_of(
      launch.environment, [&](const std::string& each) { return each == name || each.starts_with(name + "="); });
  if (given || std::getenv(kRecorder) != nullptr) return "";
  std::error_code none;
  const std::filesystem::path folder = std::filesystem::temp_directory_path(none);
  return none ? "" : (folder / ("whale-flight-" + new_token())).string();
}

std::vector<Host> hosts_of(const Launch& launch) {
  if (!launch.hosts.empty()) return read_hosts(launch.hosts, launch.processes);
  if (launch.processes == 0) throw Failure("give -n, the number of processes, or --hosts");
  return {{"localhost", static_cast<int>(launch.processes)}};
}

std::string address_of(const Launch& launch, const std::vector<Host>& hosts) {
  if (!launch.address.empty()) return launch.address;
  if (hosts.size() == 1) return "127.0.0.1";
  if (hosts[0].here())
    throw Failure("give --address, a name of this machine that the other hosts know: rank 0 is on localhost");
  return hosts[0].address();
}

std::vector<RankSpec> ranks_of(const Launch& launch, const std::vector<std::string>& program,
                               const std::string& records) {
  const std::vector<Host> hosts = hosts_of(launch);
  const std::string address = address_of(launch, hosts), token = new_token();
  const uint16_t given = static_cast<uint16_t>(launch.port);
  const uint16_t port = hosts[0].here() ? local_port(given) : given != 0 ? given : random_port();
  std::error_code none;
  const std::string folder = std::filesystem::current_path(none).string();
  int size = 0;
  for (const Host& host : hosts) size += host.ranks;
  std::vector<RankSpec> ranks;
  for (const Host& host : hosts)
    for (int local = 0; local < host.ranks; ++local) {
      RankSpec rank{host.here() ? this_host() : host.name, !host.here(), program, {}, ""};
      for (const std::string& each : launch.environment) rank.environment.push_back(variable(each));
      if (!records.empty()) rank.environment.push_back(std::string(kRecorder) + "=" + records);
      for (const auto& [name, value] :
           std::initializer_list<std::pair<const char*, std::string>>{{"RANK", std::to_string(ranks.size())},
                                                                      {"WORLD_SIZE", std::to_string(size)},
                                                                      {"LOCAL_RANK", std::to_string(local)},
                                                                      {"LOCAL_WORLD_SIZE", std::to_string(host.ranks)},
                                                                      {"MASTER_ADDR", address},
                                                                      {"MASTER_PORT", std::to_string(port)},
                                                                      {"WHALE_JOB_TOKEN", token}})
        rank.environment.push_back(std::string(name) + "=" + value);
      if (rank.remote) {
        RemoteCommand remote = over_ssh(host.name, folder, program, rank.environment,
                                        static_cast<int>(std::max(1.0, launch.connect_timeout)));
        rank.words = std::move(remote.words), rank.input = std::move(remote.input);
        rank.environment.clear();
      }
      ranks.push_back(std::move(rank));
    }
  return ranks;
}

}  // namespace

void add_launch(CLI::App& app, const std::vector<std::string>& program, int& exit_code) {
  auto* command =
      app.add_subcommand("launch",
                         "start a program as several processes: whale launch -n 4 -- PROGRAM ARGUMENTS. Each finds in "
                         "its environment RANK, "
                         "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and WHALE_JOB_TOKEN");
  auto launch = std::make_shared<Launch>();
  command->add_option("-n,--processes", launch->processes, "how many; with --hosts by default one for each")
      ->check(whole(1, 65536));
  command->add_option("--hosts", launch->hosts,
                      "where: a,b:2 are two hosts, the second with two ranks; over ssh, without a password, in this "
                      "folder (localhost: without ssh)");
  command->add_option("--port", launch->port, "of rank 0, where ranks meet; by default one that is free")
      ->check(whole(1, 65535));
  command->add_option("--address", launch->address,
                      "of rank 0, as the others know it; by default the first host's name, or 127.0.0.1 on one host");
  command
      ->add_option("--env", launch->environment,
                   "NAME=VALUE for all ranks, or NAME, with the value that it has here; may be given again")
      ->take_all()
      ->expected(1);
  command
      ->add_option("--output", launch->output,
                   "prefix: lines of other ranks than 0 begin with [rank 2]; all: without; first: other ranks' "
                   "standard output is not shown")
      ->check(CLI::IsMember({"prefix", "all", "first"}));
  command->add_option("--output-dir", launch->output_dir, "also a file for each rank, rank-2.log, in this folder");
  command
      ->add_option("--grace", launch->grace,
                   "seconds that the others have when one has failed, until SIGTERM; as many again until SIGKILL")
      ->check(not_negative());
  command->add_option("--connect-timeout", launch->connect_timeout, "seconds that a host has to answer to ssh")
      ->check(above_zero());
  command->callback([launch, &program, &exit_code] {
    if (program.empty())
      throw Failure("`whale launch` needs a program, behind --: whale launch -n 4 -- PROGRAM ARGUMENTS");
    JobOptions options{launch->output == "all"     ? Shown::kAll
                       : launch->output == "first" ? Shown::kFirst
                                                   : Shown::kPrefixed,
                       launch->output_dir, launch->grace, launch->connect_timeout};
    const std::string records = records_of(*launch);
    const std::vector<RankSpec> ranks = ranks_of(*launch, program, records);
    if (std::error_code failed; !options.output_dir.empty()) {
      std::filesystem::create_directories(options.output_dir, failed);
      if (failed) throw Failure("--output-dir: '" + shown(options.output_dir) + "': " + failed.message());
    }
    exit_code = run_job(ranks, options);
    if (std::error_code none; exit_code != 0 && !records.empty() && std::filesystem::exists(records, none))
      std::fputs(("whale: what each rank was at: whale inspect " + records + "/rank-*.json\n").c_str(), stderr);
  });
}

}  // namespace tool
