/** Dark and light themes: that of the system, until the user selects one. Prints are always light. */

const KEY = "moe-report-theme";

export class ThemeSwitch {
  private override: string | null = null;

  constructor(private onChange: () => void) {
    try {
      this.override = localStorage.getItem(KEY);
    } catch {
      // Some browsers forbid the storage for files.
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.apply());
    addEventListener("beforeprint", () => this.set("light"));
    addEventListener("afterprint", () => this.apply());
    this.apply();
  }

  get dark(): boolean {
    return this.override ? this.override === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  toggle(): void {
    this.override = this.dark ? "light" : "dark";
    try {
      localStorage.setItem(KEY, this.override);
    } catch {
      // The theme then lasts as long as the page.
    }
    this.apply();
  }

  private apply(): void {
    this.set(this.dark ? "dark" : "light");
  }

  private set(theme: string): void {
    document.documentElement.dataset.theme = theme;
    this.onChange();
  }
}
